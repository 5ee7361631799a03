"""Which page of the KV pool belongs to whom. Page numbers only: the keys and values are in `paged_attention`.

Running sequences take the lowest free pages and the prefix cache the highest, so that the pages attention reads lie
together at the start of the pool. A change of contents is appended to `operations`, which the owner of the tensors
carries out in order before the next forward.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Container
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from rollbook.types import Ids


@dataclass(frozen=True, slots=True)
class ZeroPages:
    """These pages get a new owner: clear them, so that nothing of the last owner (a NaN, say) can be read."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy page sources[i] to page targets[i]."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


PageOperation = ZeroPages | CopyPages


def merged(operations: Items[PageOperation]) -> list[PageOperation]:
    """The same effect in few operations: all that may be cleared at once, and then all that may be copied at once.

    Pages are cleared before the copies that were asked for earlier where these neither read nor write them.
    """
    result: list[PageOperation] = []
    cleared: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    read: set[int] = set()
    written: set[int] = set()

    def close() -> None:
        if cleared:
            result.append(ZeroPages(tuple(cleared)))
        if targets:
            result.append(CopyPages(tuple(sources), tuple(targets)))
        for pages in (cleared, sources, targets, read, written):
            pages.clear()

    for operation in operations:
        if isinstance(operation, ZeroPages):
            if not (read.isdisjoint(operation.pages) and written.isdisjoint(operation.pages)):
                close()
            cleared += operation.pages
            continue
        touched = (operation.sources, operation.targets)
        if not (all(map(written.isdisjoint, touched)) and read.isdisjoint(operation.targets)):
            close()
        sources += operation.sources
        targets += operation.targets
        read.update(operation.sources)
        written.update(operation.targets)
    close()
    return result


class _Pages:
    """Pages by their number from one end of the pool. A page that is taken from elsewhere stays until it comes up, and
    stands here once however often it comes back meanwhile."""

    def __init__(self, pages: Items[int] = (), *, highest_first: bool = False) -> None:
        self._sign = -1 if highest_first else 1
        self._heap = sorted(self._sign * page for page in pages)
        self._held = set(pages)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, page: int) -> None:
        if page not in self._held:
            self._held.add(page)
            heapq.heappush(self._heap, self._sign * page)

    def first(self, wanted: Container[int]) -> int | None:
        """The first page that is among `wanted`, or None."""
        while self._heap and self._sign * self._heap[0] not in wanted:
            self._drop_first()
        return self._sign * self._heap[0] if self._heap else None

    def take_first(self, wanted: Container[int]) -> int:
        page = self.first(wanted)
        assert page is not None, "the caller knows that there is one"
        self._drop_first()
        return page

    def _drop_first(self) -> None:
        self._held.remove(self._sign * heapq.heappop(self._heap))


class PagePool:
    """Free pages of a pool of `num_pages`, taken from either end."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.operations: list[PageOperation] = []
        self._free = set(range(num_pages))
        self._lowest = _Pages(range(num_pages))
        self._highest = _Pages(range(num_pages), highest_first=True)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lowest_free(self) -> int | None:
        """The free page nearest the start, still free."""
        return self._lowest.first(self._free)

    def take_lowest(self) -> int:
        return self._taken(self._lowest.take_first(self._free))

    def take_highest(self) -> int:
        return self._taken(self._highest.take_first(self._free))

    def give_back(self, pages: Items[int]) -> None:
        for page in pages:
            assert page not in self._free, f"page {page} given back twice"
            self._free.add(page)
            self._lowest.add(page)
            self._highest.add(page)

    def zero(self, pages: Items[int]) -> None:
        if pages:
            self.operations.append(ZeroPages(tuple(pages)))

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        if sources:
            self.operations.append(CopyPages(tuple(sources), tuple(targets)))

    def _taken(self, page: int) -> int:
        self._free.remove(page)
        return page


PageKey = tuple[int, bytes]
"""A cached page: the id of the page before it (0: none) and its tokens, int32."""


@dataclass(frozen=True, slots=True)
class _CachedPage:
    node_id: int
    page: int


@dataclass(slots=True)
class CacheHit:
    """The longest cached prefix of some tokens."""

    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class PrefixCache:
    """Pages of finished sequences, found again by their exact tokens, and only under the weights that made them.

    A trie of pages: the key of a page is its parent's id and its tokens. The last page of a sequence may hold fewer
    tokens than fit. Pages are copied to whoever reuses them, never shared, so a page also serves a sequence that
    agrees with only its first tokens.
    """

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        self.pool = pool
        self.page_tokens = page_tokens
        self._by_key: OrderedDict[PageKey, _CachedPage] = OrderedDict()
        self._children: dict[int, list[bytes]] = {}
        """Tokens of a page's children, sorted: the two beside a text share the longest beginning with it."""
        self._key_of: dict[int, PageKey] = {}
        self._lowest = _Pages()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, token_ids: Ids) -> CacheHit:
        """The longest prefix of `token_ids` held here."""
        hit = CacheHit()
        touched: list[PageKey] = []
        parent_id = 0
        while hit.num_tokens < len(token_ids):
            wanted = token_ids[hit.num_tokens : hit.num_tokens + self.page_tokens].tobytes()
            nearest = self._nearest_child(parent_id, wanted)
            num_tokens = _common_tokens(nearest, wanted)
            if num_tokens == 0:
                break
            held = self._by_key[parent_id, nearest]
            touched.append((parent_id, nearest))
            hit.pages.append(held.page)
            hit.num_tokens += num_tokens
            if num_tokens < self.page_tokens:
                break
            parent_id = held.node_id
        self._touch(touched)
        return hit

    def keep(self, token_ids: Ids, pages: Items[int]) -> None:
        """Copy the pages of a finished sequence into the cache, as far as free or least recently used pages allow."""
        path: dict[PageKey, None] = {}
        sources: list[int] = []
        targets: list[int] = []
        parent_id, size = 0, self.page_tokens
        for idx, source in enumerate(pages):
            tokens = token_ids[idx * size : (idx + 1) * size].tobytes()
            key = (parent_id, tokens)
            held = self._by_key.get(key)
            if held is None:
                if not self.pool.num_free and not self.evict(1, keep=path):
                    break
                held = _CachedPage(self._next_id, self.pool.take_highest())
                self._next_id += 1
                self._place(key, held)
                bisect.insort(self._children.setdefault(parent_id, []), tokens)
                sources.append(source)
                targets.append(held.page)
            path[key] = None
            parent_id = held.node_id
        self.pool.copy(sources, targets)
        self._touch(list(path))

    def evict(self, num_pages: int, keep: Container[PageKey] = ()) -> bool:
        """Give the least recently used pages, except `keep`, back to the pool; False when there are not enough."""
        for _ in range(num_pages):
            victim = next((key for key in self._by_key if key not in keep), None)
            if victim is None:
                return False
            page = self._by_key.pop(victim).page
            del self._key_of[page]
            self.pool.give_back([page])
            parent_id, tokens = victim
            siblings = self._children[parent_id]
            del siblings[bisect.bisect_left(siblings, tokens)]
            if not siblings:
                del self._children[parent_id]
        return True

    def clear(self) -> None:
        self.evict(len(self._by_key))

    def make_way(self, page: int) -> int:
        """Move the cached page nearest the start of the pool to `page`, if it lies before it, and return its place.

        So what runs keeps to the start of the pool even when the cache fills all the rest.
        """
        freed = self._lowest.first(self._key_of)
        if freed is None or freed > page:
            return page
        key = self._key_of.pop(freed)
        self._place(key, _CachedPage(self._by_key[key].node_id, page))
        self.pool.copy([freed], [page])
        return freed

    def _place(self, key: PageKey, held: _CachedPage) -> None:
        self._by_key[key] = held
        self._key_of[held.page] = key
        self._lowest.add(held.page)

    def _nearest_child(self, parent_id: int, wanted: bytes) -> bytes:
        siblings = self._children.get(parent_id, [])
        place = bisect.bisect_left(siblings, wanted)
        return max(
            siblings[max(0, place - 1) : place + 1], key=lambda s: _common_tokens(s, wanted), default=b""
        )

    def _touch(self, path: Items[PageKey]) -> None:
        # Leaf first: a page is always more recent than its children, so children are evicted before it.
        for key in reversed(path):
            self._by_key.move_to_end(key)


def _common_tokens(one: bytes, other: bytes) -> int:
    """Length of the common beginning of two texts of int32 tokens."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // 4
    return next(i for i in range(0, size, 4) if one[i : i + 4] != other[i : i + 4]) // 4

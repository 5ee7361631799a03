"""Which page of the KV pool belongs to whom. Page numbers only: the keys and values are in `paged_attention`.

Running sequences take the lowest free pages and the prefix cache the highest, so that the pages attention reads lie
together at the start of the pool. A change of contents is appended to `operations`, which the owner of the tensors
carries out in order before the next forward.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
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
    """The same effect in fewer operations: neighbors of one kind become one where their order doesn't matter."""
    result: list[PageOperation] = []
    for operation in operations:
        last = result[-1] if result else None
        if isinstance(operation, ZeroPages) and isinstance(last, ZeroPages):
            result[-1] = ZeroPages(last.pages + operation.pages)
        elif (
            isinstance(operation, CopyPages)
            and isinstance(last, CopyPages)
            and not set(last.targets) & {*operation.sources, *operation.targets}
            and not set(last.sources) & set(operation.targets)
        ):
            result[-1] = CopyPages(last.sources + operation.sources, last.targets + operation.targets)
        else:
            result.append(operation)
    return result


class PagePool:
    """Free pages of a pool of `num_pages`, taken from either end."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.operations: list[PageOperation] = []
        self._free = set(range(num_pages))
        self._lowest = list(range(num_pages))
        self._highest = [-page for page in reversed(range(num_pages))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lowest_free(self) -> int | None:
        """The free page nearest the start, still free."""
        return self._peek(self._lowest, 1)

    def take_lowest(self) -> int:
        return self._take(self._lowest, 1)

    def take_highest(self) -> int:
        return self._take(self._highest, -1)

    def give_back(self, pages: Items[int]) -> None:
        for page in pages:
            assert page not in self._free, f"page {page} given back twice"
            self._free.add(page)
            heapq.heappush(self._lowest, page)
            heapq.heappush(self._highest, -page)

    def zero(self, pages: Items[int]) -> None:
        if pages:
            self.operations.append(ZeroPages(tuple(pages)))

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        if sources:
            self.operations.append(CopyPages(tuple(sources), tuple(targets)))

    def _peek(self, heap: list[int], sign: int) -> int | None:
        # A page taken from one end stays in the other end's heap until it comes up there.
        while heap and sign * heap[0] not in self._free:
            heapq.heappop(heap)
        return sign * heap[0] if heap else None

    def _take(self, heap: list[int], sign: int) -> int:
        page = self._peek(heap, sign)
        assert page is not None, "the caller checks num_free"
        heapq.heappop(heap)
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
        self._lowest: list[int] = []
        """Heap of cached pages; one that left the cache stays in it until it comes up."""
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
        path: list[PageKey] = []
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
            path.append(key)
            parent_id = held.node_id
        self.pool.copy(sources, targets)
        self._touch(path)

    def evict(self, num_pages: int, keep: Items[PageKey] = ()) -> bool:
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
        while self._lowest and self._lowest[0] not in self._key_of:
            heapq.heappop(self._lowest)
        if not self._lowest or self._lowest[0] > page:
            return page
        freed = heapq.heappop(self._lowest)
        key = self._key_of.pop(freed)
        self._place(key, _CachedPage(self._by_key[key].node_id, page))
        self.pool.copy([freed], [page])
        return freed

    def _place(self, key: PageKey, held: _CachedPage) -> None:
        self._by_key[key] = held
        self._key_of[held.page] = key
        heapq.heappush(self._lowest, held.page)

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

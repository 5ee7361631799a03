"""Numbers as a person reads them: seconds, shares, counts, GPUs."""

from __future__ import annotations

from rollbook.ledger.quantity import format_bytes
from rollbook.observe.numbers import counted

_MOST_HOURS = 100
"""Beyond which a person counts days."""


def seconds(value: float) -> str:
    """Three digits, in the unit a person would use.

    >>> seconds(0.0215), seconds(46.63), seconds(810.1), seconds(7421.0), seconds(7199.0)
    ('21.5 ms', '46.6 s', '810 s', '2 h 04 min', '2 h 00 min')
    >>> seconds(0.0), seconds(1e9), seconds(0.99961), seconds(0.00099961)
    ('0 s', '11,574 days', '1.0 s', '1 ms')
    """
    if value >= _MOST_HOURS * 3600:
        return f"{value / 86400:,.{1 if value < 100 * 86400 else 0}f} days"
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs" if value else "0 s"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 99.95:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{value:,.0f} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes:02d} min"


def seconds_range(low: float, high: float) -> str:
    """Both ends in the unit of the upper one.

    >>> seconds_range(0.0041, 0.0215), seconds_range(8.1, 25.4), seconds_range(99.0, 810.1)
    ('4.1 to 21.5 ms', '8.1 to 25.4 s', '99 to 810 s')
    >>> seconds_range(2087.0, 3661.0), seconds_range(7421.0, 9000.0)
    ('35 min to 1 h 01 min', '2 h 04 min to 2 h 30 min')
    """
    if high >= 3600:
        short = f"{low / 60:.0f} min" if low < 3600 else seconds(low)
        return f"{short} to {seconds(high)}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if high >= size or unit == "µs":
            digits = 0 if high >= 99.95 * size else 1
            return f"{low / size:,.{digits}f} to {high / size:,.{digits}f} {unit}"
    raise AssertionError


def seconds_within(value: float, low: float, high: float) -> str:
    """With its range, where it has one.

    >>> seconds_within(46.6, 30.0, 60.0), seconds_within(46.6, 46.6, 46.6)
    ('46.6 s (30.0 to 60.0 s)', '46.6 s')
    """
    return f"{seconds(value)} ({seconds_range(low, high)})" if high > 1.001 * low else seconds(value)


def percent(frac: float) -> str:
    """
    >>> percent(0.2871), percent(0.004), percent(0.0001), percent(1.0), percent(2.46)
    ('28.7 %', '0.4 %', '< 0.1 %', '100 %', '246 %')
    """
    if 0 < frac < 0.0005:
        return "< 0.1 %"
    return f"{100 * frac:.{1 if frac < 0.9995 else 0}f} %"


def gpu_hours(gpu_s: float) -> str:
    """Of a step.

    >>> gpu_hours(67.1), gpu_hours(7200.0), gpu_hours(86.4e6)
    ('0.019', '2.0', '24,000')
    """
    hours = gpu_s / 3600
    return f"{hours:.2g}" if hours < 0.95 else f"{hours:,.{1 if hours < 999.5 else 0}f}"


def count(value: float) -> str:
    """
    >>> count(8192), count(71.2e6), count(3.73e18)
    ('8,192', '71.2 M', '3.73e18')
    """
    if value < 1e5:
        return f"{value:,.0f}"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value < 1e15 and value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.2e}".replace("e+", "e")


def flop_count(value: float) -> str:
    """Powers of ten, whatever their size: a column of them is compared.

    >>> flop_count(429.3e12), flop_count(3.73e18), flop_count(0)
    ('4.29e14', '3.73e18', '0')
    """
    return f"{value:.2e}".replace("e+", "e") if value else "0"


def device_words(text: str, *, is_cpu: bool) -> str:
    """Prose about devices, as it reads where they are processors.

    >>> device_words("1 shared GPU, 0.3 GPU hours", is_cpu=True)
    '1 shared CPU, 0.3 CPU hours'
    """
    return text.replace("GPU", "CPU") if is_cpu else text


MODE_TITLES = {
    "sync": "colocated, synchronous",
    "colocate_async": "colocated, asynchronous",
    "separate_sync": "separated, synchronous",
    "separate_async": "separated, asynchronous",
}


def split(rollout_gpus: int, train_gpus: int, mode: str) -> str:
    """
    >>> split(40, 24, "separate_async"), split(64, 64, "sync")
    ('40:24', '64 shared')
    """
    return f"{rollout_gpus}:{train_gpus}" if mode.startswith("separate") else f"{rollout_gpus} shared"


def split_gpus(rollout_gpus: int, train_gpus: int, mode: str) -> str:
    """
    >>> split_gpus(40, 24, "separate_async"), split_gpus(1, 1, "sync")
    ('40:24 GPUs', '1 shared GPU')
    """
    return (
        f"{rollout_gpus}:{train_gpus} GPUs"
        if mode.startswith("separate")
        else counted(rollout_gpus, "shared GPU")
    )


def capitalized(sentence: str) -> str:
    """First letter in upper case, the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


__all__ = [
    "MODE_TITLES",
    "capitalized",
    "count",
    "counted",
    "device_words",
    "format_bytes",
    "gpu_hours",
    "percent",
    "seconds",
    "seconds_range",
    "seconds_within",
    "split",
    "split_gpus",
]

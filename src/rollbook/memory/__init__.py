"""Who owns how many bytes of a device when, and the moves by which a device changes hands.

`register` counts, `handover` moves, `parking` keeps what leaves a device in page-locked host memory, `region` gives
an owner an allocator pool of its own. This folder never decides when to switch, and knows no algorithm.
"""

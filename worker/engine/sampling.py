"""rules: a request's chance: a number that depends on its seed and the token's number alone. Knows no tensor."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's answers: of the first its own, of each other a number of 63 bits that depends on
    that and its place alone."""
    return seed if choice == 0 else _mixed(seed, ~choice) >> 1


def uniform(seed: int, number: int) -> float:
    """A number in [0, 1) with 24 bits, from a request's seed and the token's number: SplitMix64 (Steele, Lea, Flood
    2014) over both, so that neighbouring seeds and numbers share nothing."""
    return (_mixed(seed, number) >> 40) / (1 << 24)


def _mixed(seed: int, number: int) -> int:
    """64 bits."""
    state = (seed & _MASK) * 0x9E3779B97F4A7C15 + (number & _MASK) * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state

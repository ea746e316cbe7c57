"""Random numbers from counters: draw i of a stream depends on its key and on i alone, so it can be made anywhere, in any order.

The mixer is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014),
on int64 that wraps: what neither numpy nor torch does on unsigned words on every device.
"""

from __future__ import annotations

from steptime._lookups.arrays import Array

UNIFORM_BITS = 36
"""A uniform draw is an integer below 2**36: times a row span below 2**26 it still fits int64."""

_WORD = 1 << 64
_INCREMENT = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB


def key_of(*words: int) -> int:
    """One int64 from several integers (seed, iteration, purpose); any change in any of them gives an unrelated key."""
    key = 0
    for word in words:
        key = _mixed((key ^ (word % _WORD)) + _INCREMENT)
    return _signed(key)


def uniforms(key: int, counters: Array) -> Array:
    """One integer below 2**UNIFORM_BITS for each counter."""
    words = counters * _signed(_INCREMENT)
    words += key
    words ^= (words >> 30) & _low_bits(34)
    words *= _signed(_FIRST_FACTOR)
    words ^= (words >> 27) & _low_bits(37)
    words *= _signed(_SECOND_FACTOR)
    words ^= (words >> 31) & _low_bits(33)
    words >>= 64 - UNIFORM_BITS
    words &= _low_bits(UNIFORM_BITS)
    return words


def _mixed(word: int) -> int:
    word %= _WORD
    word = (word ^ (word >> 30)) * _FIRST_FACTOR % _WORD
    word = (word ^ (word >> 27)) * _SECOND_FACTOR % _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _low_bits(count: int) -> int:
    return (1 << count) - 1

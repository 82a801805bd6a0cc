"""One record for each place, of frequency and time of the last use. The place with the lowest record is evicted first.

    record = power << 27 | time        power 0..31, time 27 bits

The first use of a place sets its power to `least_power`. Every further use adds 1 to a power p with probability 2^-p,
so the power is about the logarithm of the number of uses. The random numbers are a pure function of (seed, id, time,
number of the use within its batch), so the same job has the same records.
"""

import numpy as np

from oneemb.kernels.arrays import Array
from oneemb.kernels.jit import Number, cpu
from oneemb.kernels.philox import philox

TIME_BITS = 27

_POWER_MAX = 31
_TIME_MASK = (1 << TIME_BITS) - 1


@cpu
def _use_records_cpu(
    record_S: Array,
    place_U: Array,
    id_U: Array,
    count_U: Array,
    new_U: Array,
    time: Number,
    least: Number,
    seed: Number,
) -> None:
    for u in range(len(place_U)):
        place = place_U[u]
        id = np.uint64(id_U[u])
        power = np.int64(record_S[place]) >> TIME_BITS
        first = 0
        if new_U[u]:
            power = least
            first = 1
        words = philox(0, 0, 0, 0, 0)
        for use in range(first, count_U[u]):
            if power == _POWER_MAX:
                break
            word = use % 4
            if word == 0 or use == first:
                words = philox(id, id >> np.uint64(32), time, use // 4, seed)
            x = words[0] if word == 0 else words[1] if word == 1 else words[2] if word == 2 else words[3]
            if np.int64(x) < np.int64(1) << (32 - power):
                power += 1
        record_S[place] = (power << TIME_BITS) | (np.int64(time) & _TIME_MASK)


def use_records(
    record_S: np.ndarray,
    place_U: np.ndarray,
    id_U: np.ndarray,
    count_U: np.ndarray,
    new_U: np.ndarray,
    *,
    time: int,
    least_power: int,
    seed: int,
) -> None:
    """Update record_S, uint32, with the uses of a batch.

    Args:
        place_U, id_U: int64 [U]: distinct places, and the ids that have these places.
        count_U: int64 [U]: number of uses of each place, 1 or more.
        new_U: bool [U]: whether this is the first use of a place by its id.
        time: number of the batch.
        least_power: power of a new place, 0 to 31.
    """
    _use_records_cpu(record_S, place_U, id_U, count_U, new_U, time, least_power, np.uint64(seed))

"""How sequences of different lengths fill packs of one length: best fit, the longest first.

Each sequence goes, the longest first, to the pack with the least room that has enough (Johnson 1973: at most 11/9 of
the fewest possible packs, and a few). The packs depend on the lengths and their order alone, so all workers find the
same ones, and so does a resumed run. For n sequences and packs of L tokens it takes time O(n (1 + L / 64)), sorting
apart, and little memory beside the result: which rooms there are is one number of L bits.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pack_sequences"]


def pack_sequences(lengths: Sequence[int], pack_length: int) -> list[list[int]]:
    """Return the numbers of the sequences of each pack, in the order in which they stand in it.

    Every sequence is in one pack. A pack has sequences in descending length; packs come in the order in which they were
    begun. Raises ValueError for a length below 1, or above `pack_length`.
    """
    for number, length in enumerate(lengths):
        if not 1 <= length <= pack_length:
            raise ValueError(f"sequence {number} has {length} tokens: a pack takes 1 to {pack_length}")
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(pack_length + 1)]  # packs, by the room that is left
    rooms = 0  # bit r: some pack has room r left
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        length = lengths[number]
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
            packs[pack].append(number)
        else:
            room, pack = pack_length, len(packs)
            packs.append([number])
        left = room - length
        if left:
            with_room[left].append(pack)
            rooms |= 1 << left
    return packs

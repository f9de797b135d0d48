"""Bounds of what is kept for transfers that are not open: early messages and tombstones."""

from pdserve.kv.parking import MAX_PARKED_PER_TRANSFER, MAX_PARKED_TRANSFERS, MAX_TOMBSTONES, Parking, Tombstones
from pdserve.kv.ticket import TransferKey


def key(number: int) -> TransferKey:
    return TransferKey(f"t{number}", 1)


def test_parked_messages_come_back_once_and_in_order() -> None:
    """Those of one transfer only."""
    parking: Parking[str] = Parking(10.0)
    for message in ("a", "b", "c"):
        assert parking.park(key(1), message, 0.0)
    assert parking.park(key(2), "other", 0.0)
    assert parking.take(key(1)) == ["a", "b", "c"]
    assert parking.take(key(1)) == []
    assert len(parking) == 1


def test_each_transfer_may_park_a_few_messages() -> None:
    """One more is refused, and so is one more transfer; those that are there stay."""
    parking: Parking[int] = Parking(10.0)
    accepted = [parking.park(key(1), number, 0.0) for number in range(MAX_PARKED_PER_TRANSFER + 2)]
    assert accepted.count(True) == len(parking) == MAX_PARKED_PER_TRANSFER
    others = [parking.park(key(number), 0, 0.0) for number in range(2, MAX_PARKED_TRANSFERS + 3)]
    assert others.count(True) == MAX_PARKED_TRANSFERS - 1
    assert len(parking.take(key(1))) == MAX_PARKED_PER_TRANSFER


def test_parked_messages_expire_with_the_first_of_their_transfer() -> None:
    """After the time they may wait, not before; the count says how many."""
    parking: Parking[str] = Parking(10.0)
    parking.park(key(1), "early", 0.0)
    parking.park(key(1), "late", 9.0)
    parking.park(key(2), "other", 5.0)
    assert parking.expire(9.9) == 0
    assert parking.expire(10.0) == 2
    assert parking.take(key(2)) == ["other"]


def test_all_may_be_taken_while_going_through_them() -> None:
    """In order of arrival, each transfer once."""
    parking: Parking[str] = Parking(10.0)
    for number in (3, 1, 3, 2):
        parking.park(key(number), "x", 0.0)
    assert [(found, len(parking.take(found))) for found in parking] == [(key(3), 2), (key(1), 1), (key(2), 1)]
    assert len(parking) == 0


def test_oldest_tombstone_makes_room() -> None:
    """A fixed number of ends is remembered; one that is set again counts as new."""
    ended: Tombstones[int] = Tombstones()
    for number in range(MAX_TOMBSTONES):
        ended.add(key(number), number)
    ended.add(key(0), -1)
    ended.add(key(MAX_TOMBSTONES), 7)
    assert (ended.get(key(0)), ended.get(key(1)), ended.get(key(2)), ended.get(key(MAX_TOMBSTONES))) == (-1, None, 2, 7)

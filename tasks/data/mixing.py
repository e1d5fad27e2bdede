"""Sources mixed by weight: how often a record is seen in an epoch."""

import hashlib

from tasks.data.records import Record
from tasks.files import canonical_json


def copies_of(record: Record, weight: float) -> int:
    """Rows that a record makes among the training rows.

    Every record is seen as often as the whole part of the weight says; once more where a hash of its content, read as a
    fraction from 0 to 1, lies below the weight's fraction. So 0.5 keeps about half of the records, 2 shows each twice,
    1.25 shows about a quarter of them a second time; which ones depends neither on their order nor on other records,
    and equal records have the same fate. The hash is another one than that which holds records out.
    """
    whole = int(weight)
    if weight == whole:
        return whole
    content = canonical_json(["weight", *record.texts()])
    place = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64
    return whole + (place < weight - whole)

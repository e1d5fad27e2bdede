import pytest

from tasks.data.mixing import copies_of
from tasks.data.records import Record, exchange

RECORDS = [Record("f", index, None, exchange(f"q{index}", f"a{index}")) for index in range(4000)]


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.25, 2.9])
def test_on_average_a_record_is_seen_as_often_as_its_weight_says(weight: float) -> None:
    copies = [copies_of(record, weight) for record in RECORDS]
    assert set(copies) == {int(weight), int(weight) + 1}
    assert sum(copies) / len(copies) == pytest.approx(weight, abs=0.03)


@pytest.mark.parametrize("weight", [1, 2, 7])
def test_a_whole_weight_shows_every_record_that_often(weight: int) -> None:
    assert {copies_of(record, weight) for record in RECORDS[:50]} == {weight}


def test_the_content_alone_decides_and_a_smaller_weight_keeps_a_part_of_a_larger_ones() -> None:
    elsewhere = [Record("other", record.index + 7, 3, record.turns) for record in RECORDS]
    kept = {weight: [copies_of(record, weight) for record in RECORDS] for weight in (0.3, 0.6)}
    assert [copies_of(record, 0.3) for record in elsewhere] == kept[0.3]
    assert all(small <= large for small, large in zip(kept[0.3], kept[0.6], strict=True))


def test_what_is_held_out_does_not_depend_on_the_weight() -> None:
    from tasks.data.making import is_held_out

    kept = [record for record in RECORDS if copies_of(record, 0.5)]
    assert sum(is_held_out(record, 0.5) for record in kept) / len(kept) == pytest.approx(0.5, abs=0.05)

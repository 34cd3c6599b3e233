"""Bytes moved: records that add, and the fields that are printed of them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.traffic import FIELDS, OperandTraffic, Traffic, Work

RECORDS = (Traffic, OperandTraffic, Work)


def names(record):
    return [field.name for field in dataclasses.fields(record)]


@pytest.mark.parametrize("record", RECORDS)
@given(data=st.data())
def test_records_add_field_by_field(record, data):
    numbers = st.lists(
        st.integers(0, 1 << 80), min_size=len(names(record)), max_size=len(names(record))
    )
    a, b = (data.draw(numbers) for _ in range(2))
    total = record(**dict(zip(names(record), a, strict=True))) + record(
        **dict(zip(names(record), b, strict=True))
    )
    assert dataclasses.astuple(total) == tuple(x + y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("record", RECORDS)
def test_an_empty_record_changes_nothing(record):
    one = record(**{name: i + 1 for i, name in enumerate(names(record))})
    assert sum([one], record()) == one
    assert record() + record() == record()


@pytest.mark.parametrize("record", RECORDS)
def test_records_are_frozen_and_named(record):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record(), names(record)[0], 1)
    with pytest.raises(TypeError):
        record(1)


def test_every_machine_prints_fields_that_exist():
    every = set(names(Traffic))
    assert set().union(*FIELDS.values()) == every
    for fields in FIELDS.values():
        assert len(set(fields)) == len(fields)
        assert all(name.endswith("_bytes") for name in fields)

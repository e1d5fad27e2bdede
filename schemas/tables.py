"""Arrow schemas of the staged tables. Both sides check them: the writer on writing, the reader on opening."""

import pyarrow as pa

from schemas.errors import StoreError

IGNORE_LABEL = -100  # a position that is not trained on


def _field(name: str, type_: pa.DataType, meaning: str) -> pa.Field:
    return pa.field(name, type_, nullable=False, metadata={"meaning": meaning})


def _list(name: str, type_: pa.DataType, meaning: str) -> pa.Field:
    return _field(name, pa.list_(pa.field("item", type_, nullable=False)), meaning)


# A row is what one place of a batch takes: one record, or several packed after each other, its segments.
TOKENS = pa.schema(
    [
        _list("input_ids", pa.int32(), "token ids, not padded"),
        _list(
            "labels",
            pa.int32(),
            f"the token ids themselves where they are trained on, {IGNORE_LABEL} elsewhere; shifted in the loss only",
        ),
        _list("segment_ids", pa.int32(), "number of the token's segment in its row, from 1; 0 is left to padding"),
        _list("positions", pa.int32(), "place of the token in its segment, from 0"),
        _list(
            "sources",
            pa.int32(),
            "of each segment: index of the data file from 0, training before validation, folders spelled out",
        ),
        _list("records", pa.int64(), "of each segment: index of the record in its file, from 0"),
    ],
    metadata={"mindtune.table": "tokens", "mindtune.version": "2"},
)


def check_schema(found: pa.Schema, wanted: pa.Schema, path: str) -> None:
    """Refuse a table that is not of the schema named.

    Raises:
        StoreError: a column is missing, extra, of another type or nullable.
    """
    if not found.equals(wanted, check_metadata=False):
        raise StoreError("store.table_schema", path=path, found=_one_line(found), wanted=_one_line(wanted))


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)

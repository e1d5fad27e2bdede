"""Arrow schemas of the staged tables. Both sides check them: the writer on writing, the reader on opening."""

import pyarrow as pa

from schemas.errors import StoreError

IGNORE_LABEL = -100  # a position that is not trained on


def _field(name: str, type_: pa.DataType, meaning: str) -> pa.Field:
    return pa.field(name, type_, nullable=False, metadata={"meaning": meaning})


TOKENS = pa.schema(
    [
        _field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), "token ids, not padded"),
        _field(
            "labels",
            pa.list_(pa.field("item", pa.int32(), nullable=False)),
            f"the token ids themselves where they are trained on, {IGNORE_LABEL} elsewhere; shifted in the loss only",
        ),
        _field("source", pa.int32(), "index of the data file from 0: training before validation, folders spelled out"),
        _field("record", pa.int64(), "index of the record in its file, from 0"),
    ],
    metadata={"mindtune.table": "tokens", "mindtune.version": "1"},
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

"""Rows of JSON objects and of strings, parsed by Arrow for a given schema.

Invariant: the result has one row for each text. A text that cannot be parsed has a row of nulls, and a reason.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from oneemb.kernels.extras import need

_BRACE = ord("{")


def schema_of(schema: Any, what: str) -> Any:
    """pyarrow.Schema of a schema, or of a dict from names to pyarrow types or their names, such as "int64".

    Raises:
        TypeError, ValueError: the argument is neither.
        ImportError: pyarrow is not installed.
    """
    pa = need("pyarrow", what, "parquet")
    if isinstance(schema, pa.Schema):
        return schema
    if not isinstance(schema, Mapping) or not schema:
        raise TypeError(f'{what} needs schema={{"column": "type", ...}} or a pyarrow.Schema, got {schema!r}')
    fields = []
    for name, kind in schema.items():
        try:
            fields.append((name, kind if isinstance(kind, pa.DataType) else pa.type_for_alias(kind)))
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{what}: the type of column {name!r} must be a pyarrow type or the name of one, such as"
                f' "string", "int64", "float" or "bool", got {kind!r}; a list is pyarrow.list_(pyarrow.string())'
            ) from error
    return pa.schema(fields)


def columns_of(schema: Any, names: Collection[str]) -> Any:
    """pyarrow.Schema with only the columns of these names."""
    import pyarrow as pa

    return pa.schema([field for field in schema if field.name in names])


def parse_json(texts: Sequence[bytes], schema: Any) -> tuple[Any, dict[int, str]]:
    """(table of N rows, {row: why it is bad}) of N texts, each a JSON object.

    Columns that the schema does not name are left out; those that an object does not have are null.
    """
    import pyarrow as pa
    import pyarrow.json

    block = b"\n".join(texts) + b"\n"
    if block.count(b"\n") != len(texts):  # JSON has line breaks between values alone.
        texts = [text.replace(b"\n", b" ") for text in texts]
        block = b"\n".join(texts) + b"\n"
    end_N = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
    begin_N = np.concatenate([np.zeros(1, np.int64), end_N[:-1]])
    byte_X = np.frombuffer(block, np.uint8)
    parse_options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    read_options = pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(block), 1))

    def parse(begin: int, end: int) -> Any:
        # An empty line has no row, and a line of two objects has two: neither may hide the other. And Arrow 26 ends the
        # process at some texts that begin with another value than an object.
        if (byte_X[begin_N[begin:end]] != _BRACE).any():
            raise pa.ArrowInvalid("a row must be a JSON object that begins with {")
        part = pa.py_buffer(block).slice(int(begin_N[begin]), int(end_N[end - 1] - begin_N[begin]))
        return pyarrow.json.read_json(
            pa.BufferReader(part), read_options=read_options, parse_options=parse_options
        ).select(schema.names)

    return _rows(parse, len(texts), schema)


def parse_strings(columns: Mapping[str, Sequence[bytes | None]], schema: Any) -> tuple[Any, dict[int, str]]:
    """(table of N rows, {row: why it is bad}) of columns of N texts, cast to the types of the schema.

    Columns that the schema does not name are left out; those that are not given are null.
    """
    import pyarrow as pa

    rows = len(next(iter(columns.values()), ()))

    def parse(begin: int, end: int) -> Any:
        arrays = []
        for field in schema:
            if field.name in columns:
                text = pa.array(columns[field.name][begin:end], pa.binary())
                is_binary = pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
                arrays.append(text if is_binary else text.cast(pa.string()).cast(field.type))
            else:
                arrays.append(pa.nulls(end - begin, field.type))
        return pa.table(arrays, schema=schema)

    return _rows(parse, rows, schema)


def _rows(parse: Callable[[int, int], Any], rows: int, schema: Any) -> tuple[Any, dict[int, str]]:
    """Parse all rows at once; where that fails, halves, down to the rows that are bad."""
    import pyarrow as pa

    bad: dict[int, str] = {}

    def parts(begin: int, end: int) -> list[Any]:
        try:
            table, why = parse(begin, end), "it must be one JSON object"
            if table.num_rows == end - begin:
                return [table]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            why = str(error).partition("\n")[0]
        if end - begin == 1:
            bad[begin] = why
            return [pa.table([pa.nulls(1, field.type) for field in schema], schema=schema)]
        middle = (begin + end) // 2
        return [*parts(begin, middle), *parts(middle, end)]

    table = pa.concat_tables(parts(0, rows)) if rows else schema.empty_table()
    return table, bad

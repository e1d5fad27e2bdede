"""Rows of a training from plain lists."""

import numpy as np

from tasks.data.packing import Row


def row_of(*segments):
    """A row from its segments, each a pair (ids, labels)."""
    columns = [
        [np.array(ids), np.array(labels), np.full(len(ids), number), np.arange(len(ids))]
        for number, (ids, labels) in enumerate(segments, 1)
    ]
    return Row(*(np.concatenate(parts).astype(np.int32) for parts in zip(*columns, strict=True)))


class ListRows:
    """What `tasks.batches` asks of rows; each is given by its segments."""

    def __init__(self, *rows):
        self.rows = [row_of(*segments) for segments in rows]

    def __len__(self):
        return len(self.rows)

    def lengths(self):
        return np.array([len(row.input_ids) for row in self.rows])

    def row(self, index):
        return self.rows[index]

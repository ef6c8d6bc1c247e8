"""Writers of rows, one for each kind of source."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import tensorflow_datasets as tfds

Rows = Sequence[Mapping[str, Any]]  # the same columns in every row


def write_jsonl(path: pathlib.Path, rows: Rows) -> str:
  """Writes one row a line; returns the path."""
  text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
  path.write_text(text, encoding="utf-8")
  return str(path)


def write_parquet(path: pathlib.Path, rows: Rows) -> str:
  """Writes one table; the path."""
  table = pyarrow.Table.from_pylist([dict(row) for row in rows])
  pyarrow.parquet.write_table(table, path)
  return str(path)


def write_saved_dataset(path: pathlib.Path, rows: Rows) -> str:
  """Writes a directory as `save_to_disk` does, with a shard for each row."""
  path.mkdir(parents=True)
  table = pyarrow.Table.from_pylist([dict(row) for row in rows])
  names = [f"data-{i:05}-of-{len(rows):05}.arrow" for i in range(len(rows))]
  for i, name in enumerate(names):
    with pyarrow.ipc.new_stream(path / name, table.schema) as file:
      file.write_table(table.slice(i, 1))
  state = {"_data_files": [{"filename": x} for x in names], "_split": None}
  (path / "state.json").write_text(json.dumps(state))
  (path / "dataset_info.json").write_text("{}")
  return str(path)


def write_tfds(
  data_dir: pathlib.Path, rows: Rows, name: str = "tiny", split: str = "train"
) -> str:
  """Writes a TFDS data set of text and numbers, without TensorFlow.

  Returns:
    The directory of the prepared data set, `data_dir/name/1.0.0`: the source
    is `tfds:DIRECTORY`, or `tfds:NAME` where `data_dir` is TFDS's own.
  """
  version = "1.0.0"
  directory = data_dir / name / version
  directory.mkdir(parents=True)
  identity = tfds.core.DatasetIdentity(
    name=name,
    version=tfds.core.Version(version),
    data_dir=str(directory),
    module_name=__name__,
  )
  features = {
    column: tfds.features.Text()
    if isinstance(value, str)
    else tfds.features.Scalar(np.asarray(value).dtype)
    for column, value in rows[0].items()
  }
  writer = tfds.core.SequentialWriter(
    tfds.core.DatasetInfo(
      builder=identity, features=tfds.features.FeaturesDict(features)
    ),
    max_examples_per_shard=1000,
    file_format="array_record",
  )
  writer.initialize_splits([split])
  writer.add_examples({split: [dict(row) for row in rows]})
  writer.close_all()
  return str(directory)

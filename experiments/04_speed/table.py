"""Results as tables and a picture."""

import pathlib

from matplotlib import figure as figures

from ..common.results import read, tidy

COLOURS = {
  "decode": "#2a6f97",
  "select, weight, pack": "#7b5ea7",
  "update": "#9e2a2b",
}


def line(row: dict) -> str:
  """One row, for the terminal."""
  parts = [row["name"]]
  if "axis" in row:
    parts.append(f"{row['axis']} x{row['factor']}")
  if "seconds_median" in row:
    parts.append(format_seconds(row))
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
  if row.get("flops"):
    parts.append(f"{share(row):.0%} of the matmul rate")
  if "bytes" in row:
    parts.append(f"{bandwidth(row):.0%} of the bandwidth")
  if "time_ratio" in row:
    parts.append(
      f"time x{row['time_ratio']:.3f}, tokens x{row['token_ratio']:.3f}"
    )
  if "row_token_ratio" in row:
    parts.append(f"prompts included x{row['row_token_ratio']:.3f}")
  if "vocab" in row:
    parts.append(f"row {row['row_length']:,}, vocabulary {row['vocab']:,}")
  if "temporary_bytes" in row:
    parts.append(f"{row['temporary_bytes'] / 2**20:,.0f} MiB")
  return " · ".join(parts)


def format_seconds(row: dict) -> str:
  median, least, most = (
    row[f"seconds_{name}"] for name in ("median", "least", "most")
  )
  return f"{median:.4f} s ({least:.4f}..{most:.4f})"


def share(row: dict) -> float:
  """Returns the fraction of the matmul rate in the computation's dtype."""
  return row["flops_per_second"] / row["yardstick"][f"{row['dtype']}_flops"]


def bandwidth(row: dict) -> float:
  return row["bytes"] / row["seconds_median"] / row["yardstick"]["bytes"]


def write(results: pathlib.Path) -> None:
  """Writes table.txt, and figure.png if growth was measured."""
  rows = read(results)
  lines = []
  machine = lambda r: (
    f"{r['work']}, {r['dtype']}, attention {r['attention']}, remat "
    f"{r['remat']}, {r['cores']} core(s) of {r['cpu']}, {r['device']}, "
    f"jax {r['jax']}"
  )
  for title in dict.fromkeys(map(machine, rows)):
    here = [r for r in rows if machine(r) == title]
    lines += [title, ""]
    for part in dict.fromkeys(r["part"] for r in here):
      yard = next(r["yardstick"] for r in here if r["part"] == part)
      lines += [
        f"{part}; matmul "
        + ", ".join(
          f"{yard[f'{d}_flops'] / 1e9:,.0f} GFLOP/s in {d}"
          for d in ("float32", "bfloat16")
        )
        + f"; memory {yard['bytes'] / 1e9:,.1f} GB/s",
        "",
      ]
      lines += [f"- {line(r)}" for r in here if r["part"] == part]
      lines.append("")
  results.with_name("table.txt").write_text("\n".join(lines))
  grown = [r for r in rows if r["part"] == "growth"]
  if grown:
    draw(grown, results.with_name("figure.png"))


def draw(rows: list[dict], path: pathlib.Path) -> None:
  """Draws seconds against size, both as multiples of the smallest."""
  axes = list(dict.fromkeys(row["axis"] for row in rows))
  figure = figures.Figure(figsize=(3.2 * len(axes), 3.4), layout="constrained")
  for plot, axis in zip(
    figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True
  ):
    for name, colour in COLOURS.items():
      here = [r for r in rows if r["axis"] == axis and r["name"] == name]
      first = here[0]
      factors = [r["factor"] for r in here]
      plot.plot(
        factors,
        [r["seconds_median"] / first["seconds_median"] for r in here],
        color=colour,
        marker="o",
        label=name,
      )
      if first["flops"]:
        plot.plot(
          factors,
          [r["flops"] / first["flops"] for r in here],
          color=colour,
          linestyle=":",
          label=f"{name}, FLOPs",
        )
    plot.set(xscale="log", yscale="log", xlabel=f"{axis}, times the smallest")
    bottom, top = plot.get_ylim()
    plot.set_ylim(min(bottom, 0.5), max(top, 20))  # what is flat looks flat
    plot.set_xticks(factors, [str(f) for f in factors])
    plot.minorticks_off()
    tidy(plot)
  figure.axes[0].set_ylabel("seconds, times those of the smallest")
  figure.legend(
    *figure.axes[0].get_legend_handles_labels(),
    loc="outside lower center",
    ncols=5,
    frameon=False,
    fontsize="small",
  )
  figure.savefig(path, dpi=120)

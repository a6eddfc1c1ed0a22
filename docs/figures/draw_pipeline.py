"""Draw docs/figures/pipeline.svg: who does what at the same time in kernels/gluon_hopper.py.

A schedule, not a measurement: the lengths are chosen, the order is the kernel's.
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "pipeline", "svg.fonttype": "none", "font.size": 9})

BLOCKS = 4
LOADS, PRODUCTS, SOFTMAX = "#9ecae1", "#08519c", "#fdae6b"
ROWS = (
    "producer: TMA",
    "consumer 0: tensor cores",
    "consumer 0: other units",
    "consumer 1: tensor cores",
    "consumer 1: other units",
)

figure, axes = plt.subplots(figsize=(10.5, 3.6), layout="constrained")


def bar(row: int, begin: float, length: float, text: str, colour: str) -> None:
    axes.broken_barh([(begin, length)], (row - 0.38, 0.76), facecolors=colour, edgecolor="white")
    ink = "white" if colour == PRODUCTS else "black"
    axes.text(begin + length / 2, row, text, ha="center", va="center", color=ink, fontsize=8)


bar(0, 0, 0.9, "Q, K0", LOADS)
for block in range(1, BLOCKS):
    bar(0, 0.9 + 2 * (block - 1), 1.0, f"K{block}, V{block - 1}", LOADS)
bar(0, 0.9 + 2 * (BLOCKS - 1), 1.6, f"next Q, K0, V{BLOCKS - 1}", LOADS)

for consumer in range(2):
    products, softmax, begin = 1 + 2 * consumer, 2 + 2 * consumer, 0.9 + consumer
    bar(products, begin, 0.5, "S0", PRODUCTS)
    bar(softmax, begin + 0.5, 1.0, "P0", SOFTMAX)
    for block in range(1, BLOCKS):
        at = begin + 2.0 * block - 0.5
        bar(products, at, 0.5, f"S{block}", PRODUCTS)
        bar(products, at + 0.5, 0.7, f"P{block - 1}·V{block - 1}", PRODUCTS)
        bar(softmax, at + 0.5, 1.5, f"P{block}", SOFTMAX)
    at = begin + 2.0 * BLOCKS - 0.5
    bar(products, at, 0.7, f"P{BLOCKS - 1}·V{BLOCKS - 1}", PRODUCTS)
    bar(products, at + 0.7, 0.8, "next S0", PRODUCTS)
    bar(softmax, at + 0.7, 0.8, "store O", SOFTMAX)

axes.set_yticks(range(len(ROWS)), ROWS)
axes.invert_yaxis()
axes.set_xticks([])
axes.set_xlabel("time, not to scale")
axes.set_title(
    "One tile of four blocks: while the tensor cores multiply P of one block with V, the next scores\n"
    "become P. Two consumers fill each other's gaps, and the next tile begins before this one ends",
    fontsize=9,
    loc="left",
)
for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
axes.tick_params(length=0)
figure.savefig(Path(__file__).with_suffix("").with_name("pipeline.svg"), metadata={"Date": None})

"""Draw the measurements beside this file: ``python docs/figures/plot.py`` (needs the extra ``plots``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def results(name: str) -> list[dict[str, Any]]:
    """The results of one file, in the order in which they were measured."""
    return [run["result"] for run in json.loads((HERE / name).read_text(encoding="utf-8"))["runs"]]


def retained_shares() -> None:
    """Tokens/s against the share of history that is retained: predicted before each step, and measured."""
    runs = results("d16-retained-shares-2026-12-01.json")
    shares = [100 * run["retained"] for run in runs]
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(shares, [run["tokens_s"] for run in runs], "o-", label="measured")
    axes.plot(shares, [1000 * run["contexts"] / run["predicted_ms_step"] for run in runs], "x--", label="predicted")
    axes.set(xlabel="history retained on the device, %", ylabel="tokens/s", title="D16, 4 requests of 31,744 tokens")
    axes.legend()
    figure.savefig(HERE / "d16-retained-shares.svg", bbox_inches="tight", metadata={"Date": None})


def shared_document() -> None:
    """Tokens/s against questions on one document that is staged once a step for all of them."""
    runs = results("d16-shared-document-2026-12-01.json")
    points = {1: runs[0]["one_tokens_s"]} | {run["questions"]: run["all_tokens_s"] for run in runs}
    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.loglog(list(points), list(points.values()), "o-", base=2, label="measured")
    axes.loglog(list(points), [count * points[1] for count in points], "--", base=2, label="as many times one question")
    axes.set(xlabel="questions", ylabel="tokens/s", title="D16, one document of 131,072 tokens, 2 GiB of device pages")
    axes.legend()
    figure.savefig(HERE / "d16-shared-document.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "haulier"
    retained_shares()
    shared_document()

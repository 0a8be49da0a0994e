#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a timeline that `--trace` wrote: docs/timeline.py TRACE.json PICTURE.png [FROM TO], seconds.

Needs matplotlib; only the documentation's pictures are made with it."""
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"copy": "#4c78a8", "forward": "#59a14f", "backward": "#e15759", "update": "#b07aa1",
           "norm": "#9c755f", "scatter": "#edc948", "gather": "#76b7b2", "add": "#ff9da7"}


def main():
    events = json.load(open(sys.argv[1]))["traceEvents"]
    begin, end = (float(x) for x in sys.argv[3:5]) if len(sys.argv) > 4 else (0.0, 1e9)
    name = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = {}
    for e in events:
        at, long = e.get("ts", 0) * 1e-6, e.get("dur", 0) * 1e-6
        if e["ph"] == "X" and at + long > begin and at < end:
            spans.setdefault((e["tid"], e["name"].split()[0]), []).append((at - begin, long))
    tracks = sorted(name)
    figure, axes = plt.subplots(figsize=(13, 0.8 + 0.2 * len(tracks)))
    shown = set()
    for (track, kind), list_ in sorted(spans.items()):
        row = len(tracks) - tracks.index(track)
        axes.broken_barh(list_, (row - 0.42, 0.84), color=COLOURS.get(kind, "#888888"), linewidth=0,
                         label=None if kind in shown else kind)
        shown.add(kind)
    axes.set_yticks(range(len(tracks), 0, -1), [name[t] for t in tracks], fontsize=7)
    axes.set_xlabel("seconds")
    axes.margins(x=0.005, y=0.01)
    axes.legend(loc="upper center", ncol=len(shown), fontsize=7, bbox_to_anchor=(0.5, 1.1), frameon=False)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=90)


main()

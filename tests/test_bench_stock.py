"""bench.stock: torch's schedules and a plan give the gradients of the model without a pipeline, by one meter."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.stock import __main__ as bench
from bench.stock.page import INTRO, page

LOSSES = 64
"""Bytes of the losses of four microbatches and their gradients, which no profile counts."""


@pytest.mark.runtime
def test_ways_have_equal_gradients_and_plans_keep_to_their_caps(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SCHEDULES", {"ZBV": bench.SCHEDULES["ZBV"], "1F1B": bench.SCHEDULES["1F1B"]})
    monkeypatch.setattr(bench, "TREATMENTS", ("plain", "offload"))
    monkeypatch.setattr(bench, "PARTS", (2,))
    options = argparse.Namespace(
        devices=2, microbatches=4, blocks=2, hidden=64, ffn=96, vocab=256, sequence=16, microbatch_size=1,
        dtype=None, granularity="half", rounds=1, plan_s=0.3, samples=4, profile=None, budget=1e9,
    )  # fmt: skip
    found = bench.compare(options)
    assert len(found.stock) == 4
    for one in (*found.stock, *found.plans):
        if one.samples:
            assert one.error is not None
            assert one.error < 1e-4, one.name
    assert any(plan.samples for plan in found.plans)
    for plan in found.plans:
        if plan.samples:
            assert plan.peak_bytes is not None
            assert plan.cap_bytes is not None
            assert plan.peak_bytes <= plan.cap_bytes + LOSSES
    text = page(found, "python -m bench.stock", "here")
    path = tmp_path / "STOCK.md"
    bench._put(text, path)
    bench._put(text, path)
    assert path.read_text() == INTRO + "\n" + text

"""Where experts lie survives a restart."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest

from deepinfer_plugin import expert_arguments
from deepinfer_plugin.eplb import layout_file
from deepinfer_plugin.expert_arguments import ExpertArguments
from deepinfer_plugin.model.config import V41Config
from deepinfer_plugin.model.layout import Layout, LayoutError, expert_sets
from deepinfer_plugin.ranks import RankCounts
from deepinfer_plugin.settings import Settings

from .placements import shuffled

RANKS, REDUNDANT = 4, 4


@pytest.fixture
def config(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return V41Config.load(tiny)


def somewhere(config, seed=0):
    random = np.random.default_rng(seed)
    sets = expert_sets(config).values()
    return Layout(*(shuffled(random, layers, experts, experts + REDUNDANT, RANKS) for layers, experts in sets))


def same(a, b):
    return (a.target == b.target).all() and (a.draft == b.draft).all()


BALANCED = ExpertArguments(balanced=True, redundant=REDUNDANT)


def test_the_next_start_begins_where_the_last_balancer_ended(config):
    trivial, left = Layout.trivial(config, RANKS, REDUNDANT), somewhere(config)
    assert same(BALANCED.layout(config, RANKS, Settings()), trivial)
    layout_file.write(layout_file.default_path(config, RANKS, REDUNDANT), left, config)
    assert same(BALANCED.layout(config, RANKS, Settings()), left)
    for other in (dataclasses.replace(BALANCED, balanced=False), dataclasses.replace(BALANCED, redundant=8)):
        assert same(other.layout(config, RANKS, Settings()), Layout.trivial(config, RANKS, other.redundant))


def test_a_file_of_the_users_choice_comes_first_and_must_fit(config, tmp_path):
    layout_file.write(layout_file.default_path(config, RANKS, REDUNDANT), somewhere(config), config)
    chosen, settings = tmp_path / "mine" / "experts.json", Settings(expert_layout=str(tmp_path / "mine/experts.json"))
    assert same(BALANCED.layout(config, RANKS, settings), somewhere(config)), "it will be written later"
    layout_file.write(chosen, left := somewhere(config, 1), config)
    assert same(BALANCED.layout(config, RANKS, settings), left)
    chosen.write_text(json.dumps({"target": left.target[1:].tolist()}))
    (conflict,) = expert_arguments.conflicts(BALANCED, RankCounts(RANKS, RANKS), config, settings)
    assert conflict.startswith(f"--deepinfer-expert-layout: {chosen}: target experts: {config.num_layers - 1} layers")


def test_sglangs_format_and_json_as_text(config):
    left, trivial = somewhere(config), Layout.trivial(config, RANKS, REDUNDANT)
    text = json.dumps({"physical_to_logical_map": left.target.tolist()})
    assert same(layout_file.read(text, config, RANKS, REDUNDANT), Layout(left.target, trivial.draft))
    given = dataclasses.replace(BALANCED, location=text)
    assert same(given.layout(config, RANKS, Settings()), Layout(left.target, trivial.draft))
    with pytest.raises(LayoutError, match="the given JSON: target experts: layer 0: expert"):
        layout_file.read(json.dumps({"target": (left.target + 1).tolist()}), config, RANKS, REDUNDANT)


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"target": 1}', '{"draft": [[0]]}', '{"other": []}'])
def test_a_damaged_file_of_our_own_is_said_and_not_used(config, caplog, content):
    path = layout_file.default_path(config, RANKS, REDUNDANT)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert same(BALANCED.layout(config, RANKS, Settings()), Layout.trivial(config, RANKS, REDUNDANT))
    assert "experts start in order" in caplog.text and str(path) in caplog.text
    with pytest.raises(LayoutError):
        layout_file.read(path, config, RANKS, REDUNDANT)


def test_what_cannot_be_written_is_said(config, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        layout_file.write(tmp_path / "file" / "experts.json", somewhere(config), config)
    assert "cannot store where experts lie" in caplog.text

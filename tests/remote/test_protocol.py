"""What travels between client and agent."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

import pytest
from nightshift.errors import StepFailed
from nightshift.remote import agent
from nightshift.remote.job import CompletionRule, JobSpec, JobState, JobStatus
from nightshift.remote.protocol import (
    AGENT_PATH,
    AGENT_SOURCE,
    EXIT_DISK_FULL,
    Frame,
    FrameKind,
    FrameParser,
    agent_command,
    decode_status,
    encode_spec,
)

STREAM = b"OPEN 0 2\n{}LOG 0 5\nLOG 9BEAT 5 0\nLOG 5 4\n\n\n\0\xffEND 9 2\n{}"


def test_the_agent_says_what_the_client_expects() -> None:
    assert [field.name for field in fields(agent.Status)] == [field.name for field in fields(JobStatus)]
    assert agent.EXIT_DISK_FULL == EXIT_DISK_FULL
    status = agent.Status("a", "lost", 2, ended_by="lost: why")
    assert decode_status(agent.encode(status)) == JobStatus("a", JobState.LOST, 2, ended_by="lost: why")


def test_a_spec_survives_the_way_to_the_agent() -> None:
    rule = CompletionRule("done", "~/x", 3.0)
    spec = JobSpec("a", "echo é\n", {"A": "1"}, {"B": "2"}, rule)
    received = agent.Spec(encode_spec(spec))
    assert (received.job_id, received.script, received.env, received.secret_env) == (
        "a",
        "echo é\n",
        {"A": "1"},
        {"B": "2"},
    )
    assert received.rule is not None
    assert json.loads(encode_spec(JobSpec("a", "b")))["completion"] is None


def test_the_agent_s_path_names_its_content() -> None:
    assert f"~/.nightshift/agent-{hashlib.sha256(AGENT_SOURCE).hexdigest()[:12]}.py" == AGENT_PATH


def test_arguments_reach_the_agent_quoted() -> None:
    assert agent_command("status", "$(x)").endswith(" status '$(x)'")


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_frames_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    parser = FrameParser()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [frame for piece in pieces for frame in parser.feed(piece)] == [
        Frame(FrameKind.OPEN, 0, b"{}"),
        Frame(FrameKind.LOG, 0, b"LOG 9"),
        Frame(FrameKind.BEAT, 5, b""),
        Frame(FrameKind.LOG, 5, b"\n\n\0\xff"),
        Frame(FrameKind.END, 9, b"{}"),
    ]


@pytest.mark.parametrize("garbage", [b"Welcome to this VM!\n", b"LOG 1\n", b"LOG x 1\n", b"x" * 100])
def test_what_is_no_frame_is_refused_with_the_likely_cause(garbage: bytes) -> None:
    with pytest.raises(StepFailed, match="shell start files"):
        list(FrameParser().feed(garbage))


@pytest.mark.parametrize(
    "garbage", [b"", b"hello", b"[]", b'{"state": "asleep"}', b'{"state": "lost", "x": 1}']
)
def test_what_is_no_status_is_refused(garbage: bytes) -> None:
    with pytest.raises(StepFailed, match="which the agent does not say"):
        decode_status(garbage)

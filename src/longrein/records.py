"""The nouns of Longrein as they stand on the wire and in the store: rollout, attempt, call, event, model.

Every record is a msgspec struct that refuses unknown fields, so that a misspelt key in a request is an error. Field
names on the wire are the attribute names. Agent Lightning's shapes are kept where it has them (`Rollout`, `Event`,
`ModelEndpoint`); what goes beyond it follows the same style.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Json = dict[str, Any]


class RolloutState(str, Enum):
    queuing = "queuing"
    running = "running"
    succeeded = "succeeded"
    failed = "failed"


TERMINAL = (RolloutState.succeeded, RolloutState.failed)

#: The transitions that exist; every other one is answered 409.
TRANSITIONS = {
    (RolloutState.queuing, RolloutState.running),
    (RolloutState.queuing, RolloutState.failed),
    (RolloutState.running, RolloutState.succeeded),
    (RolloutState.running, RolloutState.failed),
}


class LocalConfig(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How Agent Lightning's local runner starts an agent: a class, and variables taken from the input."""

    agent_class: str | None = None
    env_map: dict[str, str] = field(default_factory=dict)


class K8sConfig(Struct, forbid_unknown_fields=True, omit_defaults=True):
    job_template: str | None = None


class RolloutConfig(Struct, forbid_unknown_fields=True):
    timeout_seconds: float | None = None
    """Longest run of an attempt; None takes the controller's agent.timeout_seconds."""
    local: LocalConfig | None = None
    k8s: K8sConfig | None = None
    engine: Literal["policy", "teacher"] = "policy"
    """Which model answers this rollout's calls."""
    queue_seconds: Annotated[float, Meta(ge=0)] | None = None
    """Longest wait in the queue, 0 without limit; None takes the gateway's agent.queue_seconds."""


class RolloutStatus(Struct, forbid_unknown_fields=True):
    state: RolloutState = RolloutState.queuing
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None
    version: int = 0
    """Counts the changes of this status."""
    created_at: float = 0.0
    updated_at: float = 0.0


class Rollout(Struct, forbid_unknown_fields=True):
    """One execution of a harness on a task. Rollouts of one `group_id` are compared with each other."""

    rollout_id: str
    input: Json
    is_train: bool = True
    config: RolloutConfig = field(default_factory=RolloutConfig)
    metadata: Json = field(default_factory=dict)
    status: RolloutStatus = field(default_factory=RolloutStatus)
    group_id: str | None = None


class NewRollout(Struct, forbid_unknown_fields=True):
    """The body of POST /api/rollouts is a list of these."""

    input: Json
    is_train: bool = True
    config: RolloutConfig = field(default_factory=RolloutConfig)
    metadata: Json = field(default_factory=dict)
    rollout_id: str | None = None
    group_id: str | None = None


class StatusChange(Struct, forbid_unknown_fields=True):
    state: RolloutState | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class RolloutChange(Struct, forbid_unknown_fields=True):
    """The body of PATCH /api/rollouts/{id}."""

    status: StatusChange


class Outcome(str, Enum):
    """How an attempt ended. Only infrastructure failures are retried; they are never given a reward."""

    succeeded = "succeeded"
    agent_failed = "agent_failed"
    infrastructure_failed = "infrastructure_failed"


class Usage(Struct, forbid_unknown_fields=True):
    """What an attempt's processes used."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_rss_bytes: int = 0


class Attempt(Struct, forbid_unknown_fields=True):
    """One try at a rollout. `ended_at` is None while it runs."""

    rollout_id: str
    attempt_id: str
    started_at: float = 0.0
    ended_at: float | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    reason: str | None = None
    """Why it failed, in words: `timeout`, `exit code 3: last line of its stderr`, …"""
    usage: Usage | None = None


class StartedAttempt(Struct, forbid_unknown_fields=True):
    """The answer to POST /api/rollouts/{id}/attempts: what a controller needs to start the agent."""

    rollout: Rollout
    attempt: Attempt
    token: str
    """The attempt's credential; shown here once, kept only as a hash."""


class EndAttempt(Struct, forbid_unknown_fields=True):
    """The body of PATCH /api/rollouts/{id}/attempts/{attempt}. From then on the attempt's token is refused."""

    outcome: Outcome
    exit_code: int | None = None
    reason: str | None = None
    usage: Usage | None = None


class Event(Struct, forbid_unknown_fields=True):
    event_type: str
    rollout_id: str
    attempt_id: str
    timestamp: float
    data: Json


class NewEvent(Struct, forbid_unknown_fields=True):
    event_type: str
    data: Json = field(default_factory=dict)


class ModelEndpoint(Struct, forbid_unknown_fields=True):
    """An endpoint that answers for a model name. `protocol` says how the gateway speaks to it.

    openai: requests are passed through (Agent Lightning's way). The others take token ids and give token ids: tokens
    is the embedded engine's own, vllm and sglang are spoken to as those servers are. `endpoint` is the server's URL, with
    or without its /v1.
    """

    model: str
    endpoint: str
    version: int = 0
    protocol: Literal["openai", "tokens", "vllm", "sglang"] = "openai"

    @property
    def root(self) -> str:
        """The server's URL without the `/v1` that its OpenAI routes begin with."""
        return self.endpoint.rstrip("/").removesuffix("/v1").rstrip("/")


class TerminalItem(Struct, forbid_unknown_fields=True):
    rollout_id: str
    state: RolloutState
    data_id: str
    is_train: bool


class TerminalPage(Struct, forbid_unknown_fields=True):
    """Finished rollouts in the order in which they finished; ask on with `after=next_after`."""

    items: list[TerminalItem]
    next_after: int
    total_terminal: int


class WithdrawnPage(Struct, forbid_unknown_fields=True):
    """Rollouts that were finished or deleted by somebody while an attempt of them ran; ask on with `after=next_after`."""

    instance: str
    """Names the gateway's process; ask on with it."""
    items: list[str]
    next_after: int
    complete: bool
    """Whether these are all; not if another instance was asked for, or too old a position."""


class RolloutDetail(Struct, forbid_unknown_fields=True):
    rollout: Rollout
    attempts: list[str]


class PruneRequest(Struct, forbid_unknown_fields=True):
    """The body of POST /api/store/prune: rollouts of which no token and message is needed any more."""

    through_step: int
    """Finished rollouts of this and earlier steps; those before the first step count as of step 0."""
    prefix: str = ""
    """What the rollout ids begin with: those of one run, where several share a gateway."""


class PruneResult(Struct, forbid_unknown_fields=True):
    rollouts: int = 0
    calls: int = 0
    tokens: int = 0
    """Sampled tokens that were removed."""


class GateState(Struct, forbid_unknown_fields=True):
    paused: bool
    retry_after_seconds: float
    reason: str | None
    inflight: int
    """Calls that are being sampled."""
    waiting: int = 0
    """Calls that are held, or wait for others to end (`engine.max_concurrent`)."""


class PauseRequest(Struct, forbid_unknown_fields=True):
    retry_after_seconds: float = 5.0
    reason: str | None = None


ForkCause = Literal["new", "template", "arguments", "reasoning", "rewrite", "tools", "compaction", "retokenized"]

Mode = Literal["train", "val"]


class Pruned(Struct, forbid_unknown_fields=True):
    """What `store.keep` left of a call whose tokens and messages it removed."""

    sampled: int
    """Tokens that were sampled."""
    leaf: bool
    """Whether a sample of its attempt (a leaf of the tree) ended with this call."""


#: What a call is for: the agent's own work, a sub-agent's, a title for the session, a summary that replaces history.
CallKind = Literal["main", "sub-agent", "title", "compaction"]


class Call(Struct, forbid_unknown_fields=True, kw_only=True):
    """One model request of an attempt and its answer, as it was sampled.

    Token ids are stored as a delta: the prompt is the first `prefix_length` ids of call `prefix`'s branch (its prompt,
    then its sampled ids) followed by `prompt_delta`. Messages are stored as a delta too: the first `messages_keep`
    messages of call `parent`'s conversation (its messages, then its reply), then `messages`. An append-only
    conversation of T turns takes O(T) space.
    """

    rollout_id: str
    attempt_id: str
    number: int
    """Counts the calls of the attempt, from 0, in the order in which they were admitted."""
    dialect: Literal["chat", "completions", "responses", "messages"]
    mode: Mode
    model: str
    engine: str
    """`policy`, `teacher`, or the endpoint that a call was passed through to."""
    kind: CallKind = "main"

    parent: int | None = None
    """Number of the call whose conversation this one continues."""
    fork: ForkCause | None = None
    """Why the prompt does not begin with all of `parent`'s branch; None when it does."""
    prefix: int | None = None
    prefix_length: int = 0
    prompt_delta: list[int] = field(default_factory=list)
    prompt_length: int = 0
    """Length of the whole prompt in tokens: prefix_length + len(prompt_delta)."""

    sampled: list[int] = field(default_factory=list)
    """The ids the engine sampled, stop token included."""
    logprobs: list[float] | None = None
    """Natural-log probability of each sampled id under the distribution it was sampled from; None: not known."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Run lengths of the policy versions of the sampled ids: [(version, count), …]."""

    messages_keep: int = 0
    messages: list[Json] = field(default_factory=list)
    tools: list[Json] | None = None
    """The request's tools; None when equal to `parent`'s (or none at all without a parent)."""
    reply: Json = field(default_factory=dict)
    """The assistant message as the harness was given it."""
    sampling: Json = field(default_factory=dict)

    status: Literal["ok", "error", "abandoned"] = "ok"
    """abandoned: the client went away before the answer was whole; its tokens are counted and never trained."""
    finish_reason: str | None = None
    http_status: int = 200
    error: Json | None = None
    started_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float = 0.0
    pruned: Pruned | None = None
    """None while the call is whole. Else prompt, sample, messages, tools and reply are empty; logprobs are too, or None
    where they were not known."""

    @property
    def sampled_count(self) -> int:
        """Tokens that were sampled, still recorded or not."""
        return len(self.sampled) if self.pruned is None else self.pruned.sampled


def now() -> float:
    """Seconds since the epoch, as every record's times are."""
    return time.time()

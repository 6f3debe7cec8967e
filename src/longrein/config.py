"""The run file: every option of Longrein, its default, its meaning and its check.

A run file is TOML. Each section is one model below; a key that no model knows is refused with the nearest known
name, so that a misspelt option is an error and never a silent default. `load` reads a file and applies
`section.key=value` overrides; `resolved_toml` and `defaults_text` print what a person wants to read.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(Exception):
    """A run file or an override that cannot be used. The message names the key and what was expected."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Run(Section):
    name: str = Field(default="run", description="Name of the run; its files live in DIR/NAME.")
    dir: str = Field(
        default="runs", description="Folder that holds the runs. Relative to where the command is started."
    )
    seed: int = Field(default=0, description="Seed of the task order, of sampling and of the learner.")
    folder: str = Field(
        default="", description="Folder that module:function names are imported from; empty is the run file's own."
    )
    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Restarts within ten minutes of a gateway or controller that the run has started and that ends by itself; one more ends the run.",
    )

    @property
    def path(self) -> Path:
        """The run's own folder (absolute)."""
        return (Path(self.dir) / self.name).resolve()


class Lora(Section):
    rank: int = Field(default=0, ge=0, description="Rank of the LoRA adapters; 0 trains all weights.")
    alpha: float = Field(default=32.0, gt=0, description="LoRA scale (the update is multiplied by alpha / rank).")
    targets: list[str] = Field(default=["all-linear"], description="Module names that get adapters, or all-linear.")


class Model(Section):
    name: str = Field(default="policy", description="Name under which harnesses ask for the model.")
    path: str = Field(
        default="", description="Model folder or hub name. Empty: calls go to endpoints registered by POST /api/models."
    )
    chat_template: str = Field(default="", description="Jinja file used instead of the model's own chat template.")
    context: int = Field(
        default=0, ge=0, description="Longest prompt plus reply in tokens; 0 takes the model's own maximum."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of the learner's weights.")
    autocast: Literal["auto", "none", "bfloat16"] = Field(
        default="auto",
        description="Type of the learner's matrix products; auto is bfloat16 where the device does it faster.",
    )
    sample_dtype: Literal["same", "float32", "bfloat16"] = Field(
        default="same", description="Type of the sampler's weights; same samples from the learner's own weights."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the embedded engine and learner compute."
    )
    parser: str = Field(
        default="auto",
        description="Reads reasoning and tool calls out of sampled text: auto, hermes, mistral, none or a family of the renderers package.",
    )
    system_messages: Literal["auto", "template", "user"] = Field(
        default="auto",
        description="A system message that the template refuses: template leaves it alone, user turns it into a user message, auto probes.",
    )
    lora: Lora = Field(default_factory=Lora, description="Low-rank adapters (needs the peft package).")


class Simulated(Section):
    tokens_per_second: float = Field(default=50.0, gt=0, description="Tokens of a reply in a second, at a steady rate.")
    first_token_seconds: float = Field(default=0.2, ge=0, description="Median time to a reply's first token.")
    first_token_spread: float = Field(
        default=0.0, ge=0, description="Standard deviation of that time's logarithm; 0: always the median."
    )
    reply_tokens: int = Field(default=200, ge=1, description="Median length of a reply, its stop token included.")
    reply_spread: float = Field(
        default=0.0, ge=0, description="Standard deviation of that length's logarithm; 0: always the median."
    )


class Engine(Section):
    kind: Literal["embedded", "vllm", "sglang", "openai", "scripted", "simulated"] = Field(
        default="embedded",
        description="What samples tokens: the trainer's own process, vLLM or SGLang servers, a text-only OpenAI-compatible endpoint, a Python function, or random words at a steady rate for load tests.",
    )
    urls: list[str] = Field(
        default=[], description="Servers of kind vllm or sglang. More may register by POST /api/models."
    )
    max_concurrent: int = Field(
        default=0,
        ge=0,
        description="Calls that are sampled at once; further ones wait in the gate. 0: twice max_batch for the embedded engine, no limit for others.",
    )
    url: str = Field(default="", description="Endpoint of kind openai, with its /v1.")
    model: str = Field(
        default="", description="Model name that the endpoint of kind openai knows; empty sends model.name."
    )
    api_key_env: str = Field(default="", description="Environment variable that holds the key of the openai endpoint.")
    script: str = Field(
        default="", description="module:function of kind scripted: from a request to the reply it plays."
    )
    max_batch: int = Field(default=64, ge=1, description="Sequences that the embedded engine decodes together.")
    cache_tokens: int = Field(
        default=65536, ge=0, description="Tokens of finished calls whose keys and values are kept for the next turn."
    )
    max_reply_tokens: int = Field(
        default=1024, ge=1, description="Longest reply of a call that names no limit of its own."
    )
    threads: int = Field(
        default=0, ge=0, description="CPU threads of the embedded engine and learner; 0 leaves torch's choice."
    )
    simulated: Simulated = Field(default_factory=Simulated, description="What kind simulated plays.")


class Gateway(Section):
    host: str = Field(default="127.0.0.1", description="Address to listen on. Any but loopback needs a key.")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    url: str = Field(default="", description="A gateway that runs already; empty starts one with the run.")
    key: str = Field(default="", description="Run key of trainer, controller and operator; empty makes a random one.")
    key_file: str = Field(default="", description="File that holds the run key.")
    history: Literal["faithful", "sampled", "rendered"] = Field(
        default="faithful",
        description="What a later turn sees of earlier ones: what the template gives, with recorded ids where text agrees (faithful); the model's own tokens (sampled); all encoded anew (rendered).",
    )
    control_text: Literal["text", "refuse", "special"] = Field(
        default="text",
        description="Control tokens written inside message content: ordinary text, an error, or what they say.",
    )
    train_temperature: float = Field(
        default=1.0, gt=0, description="Temperature of every call in mode train, whatever the harness asks."
    )
    val_temperature: float = Field(
        default=0.7, ge=0, description="Temperature of every call in mode val, whatever the harness asks."
    )
    retry_grace: float = Field(
        default=15.0,
        ge=0,
        description="Seconds that a call goes on after its client has gone, so that a retry can take it over.",
    )
    max_body_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1024, description="Largest request body; a larger one is answered 413."
    )
    body_seconds: float = Field(
        default=60.0, gt=0, description="Longest time that a request body may take to arrive; then it is answered 408."
    )


class Gate(Section):
    on_pause: Literal["hold", "refuse"] = Field(
        default="hold", description="Calls during a pause wait (hold) or get 429 (refuse)."
    )
    hold_seconds: float = Field(
        default=240.0, gt=0, description="Longest wait of a held call before it is refused with 429."
    )
    max_waiting: int = Field(
        default=4096,
        ge=0,
        description="Calls that may wait, held or for engine.max_concurrent, before further ones get 429; 0 sets no limit.",
    )
    in_flight: Literal["freeze", "drain"] = Field(
        default="freeze",
        description="Calls that a vLLM server is sampling when new weights come: stop at a token boundary and go on with them (freeze), or are finished first (drain). The embedded engine freezes.",
    )
    kv_after_update: Literal["auto", "keep", "recompute"] = Field(
        default="auto",
        description="Keys and values of calls that go on with new weights: those of the old ones (keep), or computed anew (recompute). auto: the embedded engine keeps, vLLM recomputes.",
    )


class Store(Section):
    url: str = Field(default="", description="SQLAlchemy URL of the record; empty is SQLite in the run's folder.")
    fsync: bool = Field(
        default=False, description="Make every commit survive a power loss too, not only the death of a process."
    )
    keep: Literal["all", "rewards"] | Annotated[int, Field(ge=1)] = Field(
        default="all",
        description="What stays of rollouts that were learned from: all, or rewards and counts without tokens and "
        "messages; a number keeps those of the last so many steps whole.",
    )


class Agent(Section):
    command: list[str] = Field(
        default=[],
        description="The harness's command. {task.FIELD} is replaced by a field of the task, {task_file} by its file.",
    )
    agent_class: str = Field(
        default="", description="An Agent Lightning agent class (module:Class) instead of a command."
    )
    env: dict[str, str] = Field(
        default={}, description="Environment variables; {task.FIELD} is replaced as in the command."
    )
    preload: list[str] = Field(
        default=[], description="Modules that a warm Python parent imports once; agents are forked from it."
    )
    workspace: str = Field(
        default="", description="Folder copied into each attempt's working directory before the agent starts."
    )
    sandbox: Literal["none", "bubblewrap"] = Field(
        default="none",
        description="What agents run in: their user's rights alone, or a bubblewrap sandbox without network but the gateway.",
    )
    user: str = Field(
        default="auto",
        description="Whom agents run as when the controller is root: a user of its own for each attempt (auto), a user's name, or root.",
    )
    first_uid: int = Field(
        default=2_000_000_000,
        ge=1000,
        description="First of the 60,000 user and group ids that agent.user = 'auto' takes from.",
    )
    expose: list[str] = Field(
        default=[], description="Files and folders that agents may read besides the system's and the interpreter's."
    )
    timeout_seconds: float = Field(default=600.0, gt=0, description="Longest run of an attempt.")
    grace_seconds: float = Field(default=5.0, ge=0, description="Time between asking an agent to end and killing it.")
    max_concurrent: int = Field(default=8, ge=1, description="Attempts that run at once.")
    max_attempts: int = Field(default=2, ge=1, description="Attempts of a rollout whose infrastructure fails.")
    max_calls: int = Field(
        default=2000,
        ge=0,
        description="Replies that an attempt's token may have sampled (n = 4 is four); 0 sets no limit.",
    )
    max_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens that an attempt's token may have sampled, prompts not counted; 0 sets no limit.",
    )
    max_concurrent_calls: int = Field(
        default=64,
        ge=0,
        description="Replies that an attempt's token may have sampled at once, and its open model requests; 0 sets no limit.",
    )
    queue_seconds: float = Field(
        default=0.0,
        ge=0,
        description="Longest wait of a rollout in the queue; then it fails. The clock stands still during a pause. 0: no limit.",
    )
    on_failure: Literal["grade", "zero", "drop"] = Field(
        default="grade",
        description="An agent that failed (its exit code) is graded as it stands, has reward 0, or its rollout has none and its group is dropped.",
    )
    on_timeout: Literal["grade", "zero", "drop"] = Field(
        default="grade", description="The same for an agent that ran into its timeout."
    )
    adopt_seconds: float = Field(
        default=300.0,
        ge=0,
        description="Time that agents run on after their controller was killed, for the next one to take them over; 0 ends them with it.",
    )
    controller: Literal["start", "external"] = Field(
        default="start", description="Start a controller with the run, or use one that runs already."
    )


class Workspace(Section):
    git: str = Field(
        default="hide",
        description="Git data in the copy of agent.workspace: none (hide), one fresh commit of all files (squash), or all of it, history included (keep); {task.FIELD} takes one of these from the task.",
    )


class Sandbox(Section):
    memory_bytes: int = Field(
        default=4 * 1024**3,
        ge=0,
        description="Memory of an attempt's processes together (of each of them where there are no cgroups); 0 sets no limit.",
    )
    processes: int = Field(
        default=512, ge=0, description="Processes and threads of an attempt at once; 0 sets no limit."
    )
    cpu_seconds: int = Field(default=3600, ge=0, description="CPU time of each process; 0 sets no limit.")
    file_bytes: int = Field(default=1024**3, ge=0, description="Largest file that is written; 0 sets no limit.")
    disk_bytes: int = Field(
        default=4 * 1024**3, ge=0, description="Size of the working directory at which the attempt is ended; 0: none."
    )
    tmp_bytes: int = Field(
        default=512 * 1024**2,
        ge=1024**2,
        description="Size of each of /tmp, /dev/shm and the home directory, in memory.",
    )
    open_files: int = Field(default=4096, ge=16, description="Open files of each process.")


class Task(Section):
    train: str = Field(
        default="", description="Training tasks: a JSON-lines file or module:function (called with the seed)."
    )
    dev: str = Field(default="", description="Tasks of the warm-up's own success check.")
    held_out: str = Field(default="", description="Tasks of the evaluation; never trained on.")
    shuffle: bool = Field(
        default=True, description="Visit the training tasks in a seeded random order, anew each epoch."
    )
    kind: str = Field(
        default="", description="Field of a task that says its kind; the reward of each kind is reported apart."
    )


class Reward(Section):
    from_: Literal["function", "agent"] = Field(
        default="function", alias="from", description="Who says the reward: a function, or the agent itself."
    )
    function: str = Field(
        default="",
        description="module:function of (task, transcript, workspace, exit_status): a float or a dict with reward.",
    )
    timeout_seconds: float = Field(default=60.0, gt=0, description="Longest run of the reward function.")


class Audit(Section):
    action: Literal["off", "report", "zero", "drop"] = Field(
        default="report",
        description="What a flag of severity act_on or above does: it is recorded (report), makes the reward 0 (zero) or leaves the rollout without one (drop); off does not look.",
    )
    act_on: Literal["low", "medium", "high"] = Field(
        default="high", description="Least severity from which on audit.action is taken; flags below are recorded only."
    )
    actions: dict[str, Literal["report", "zero", "drop"]] = Field(
        default={}, description="Actions of single rules by their id, whatever their severity."
    )
    rules: list[str] = Field(
        default=[], description="Further files of rules (TOML); a rule with the id of a built-in one replaces it."
    )
    disable: list[str] = Field(default=[], description="Ids of rules that are not looked for.")


class Warmup(Section):
    steps: int = Field(
        default=0, ge=0, description="Largest number of supervised steps before reinforcement learning; 0 skips it."
    )
    teacher: str = Field(default="", description="module:function from messages and tools to the expert's reply.")
    teacher_url: str = Field(
        default="", description="OpenAI-compatible endpoint of a teacher model, instead of a function."
    )
    teacher_model: str = Field(default="", description="Model name at teacher_url.")
    teacher_key_env: str = Field(default="", description="Environment variable that holds the teacher endpoint's key.")
    rollouts_per_step: int = Field(default=8, ge=1, description="Demonstrations learned from in one step.")
    learning_rate: float = Field(default=2e-5, gt=0, description="Learning rate of the supervised steps.")
    pass_reward: float = Field(default=1.0, description="Demonstrations below this reward are not learned from.")
    until: float = Field(
        default=0.2, ge=0, le=1, description="Stop when the mean reward on the dev tasks reaches this."
    )
    check_every: int = Field(default=1, ge=1, description="Steps between two checks on the dev tasks.")
    check_after: int = Field(default=0, ge=0, description="Steps before the first check.")
    dev_tasks: int = Field(default=32, ge=1, description="Dev tasks of a check.")


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce++", "reinforce++_baseline", "gae")
LOSSES = ("ppo_clip", "reinforce", "gspo", "cispo", "dppo_tv")


class Algorithm(Section):
    group_size: int = Field(default=8, ge=1, description="Rollouts of one task whose rewards are compared.")
    groups_per_step: int = Field(default=8, ge=1, description="Groups learned from in one step.")
    dynamic_sampling: int = Field(
        default=0,
        ge=0,
        description="Groups of equal rewards that a step may replace by other groups (DAPO's dynamic sampling); 0 keeps them.",
    )
    advantage: str = Field(
        default="grpo",
        description=f"Advantage of a rollout: {', '.join(ADVANTAGES)}, or module:function from a group's rewards to its advantages.",
    )
    discount: float = Field(
        default=1.0, gt=0, le=1, description="reinforce++ and gae: discount of a reward per sampled token before it."
    )
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="gae: decay of the advantage's further terms.")
    value_learning_rate: float = Field(default=1e-4, gt=0, description="gae: learning rate of the value head.")
    value_coefficient: float = Field(
        default=0.1,
        ge=0,
        description="gae: share of the value loss that the model itself learns from, not only its head.",
    )
    value_clip: float = Field(
        default=0.0, ge=0, description="gae: farthest that an update may move a value at a gain; 0 does not clip."
    )
    process_weight: float = Field(
        default=1.0, ge=0, description="Weight of the grader's rewards of single calls beside the rollout's reward."
    )
    process_discount: float = Field(
        default=1.0, ge=0, le=1, description="Discount of a call's reward per call before it."
    )
    overlong_tokens: int = Field(
        default=0, ge=0, description="Length of a rollout's longest reply that costs overlong_penalty; 0 punishes none."
    )
    overlong_buffer: int = Field(
        default=0, ge=0, description="Tokens before overlong_tokens over which the penalty grows from 0."
    )
    overlong_penalty: float = Field(default=1.0, gt=0, description="What a reply of overlong_tokens costs.")
    loss: str = Field(
        default="ppo_clip",
        description=f"Loss of a sampled token: {', '.join(LOSSES)}, or module:function (see docs/learning.md).",
    )
    clip_low: float = Field(
        default=0.2,
        gt=0,
        description="Lower bound: of the importance ratio at 1 - clip_low, of dppo_tv's probability at clip_low less.",
    )
    clip_high: float = Field(
        default=0.28,
        gt=0,
        description="Upper bound: of the importance ratio at 1 + clip_high, of dppo_tv's probability at clip_high more.",
    )
    dual_clip: float = Field(
        default=0.0,
        ge=0,
        description="ppo_clip: largest loss of a token in units of its advantage, if that is negative; 0 is none.",
    )
    ratio_cap: float = Field(default=20.0, gt=0, description="dppo_tv: largest importance ratio.")
    normaliser: Literal["rollout", "token", "sequence", "constant"] = Field(
        default="rollout", description="What has equal weight: rollouts, tokens, sequences, or every normaliser_tokens."
    )
    normaliser_tokens: int = Field(default=0, ge=0, description="constant: length that a rollout's sum is divided by.")
    updates_per_batch: int = Field(
        default=1, ge=1, description="Optimizer updates that a step's rollouts are divided over."
    )
    proximal: Literal["sampled", "computed"] = Field(
        default="sampled",
        description="Policy that ratios are clipped against: the one sampled from, or that of the step's beginning, computed anew (decoupled PPO).",
    )
    kl_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the divergence from the reference policy; 0 needs no reference."
    )
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="Where the divergence is counted.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="Estimate of the divergence.")
    kl_reference: str = Field(
        default="",
        description="Model folder or hub name of the reference; empty is model.path as it is (with LoRA the base model).",
    )
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus in the loss.")
    correction: Literal["none", "tis", "mis", "icepop"] = Field(
        default="none",
        description="Off-policy correction by importance ratio: none, truncated (tis), zero above the cap (mis), zero beyond either bound (icepop).",
    )
    correction_level: Literal["token", "sequence"] = Field(
        default="token", description="Whose importance ratio corrects: the token's or the whole sequence's."
    )
    correction_floor: float = Field(default=0.5, ge=0, description="icepop: smallest importance ratio that counts.")
    rejection: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none",
        description="Leave out what a ratio beyond the bounds says is off-policy: by token, by sequence, or by its geometric mean.",
    )
    rejection_low: float = Field(default=0.5, ge=0, description="rejection: smallest ratio that stays.")
    rejection_high: float = Field(default=2.0, gt=0, description="rejection: largest ratio that stays.")
    train_kinds: list[Literal["main", "sub-agent", "compaction", "title"]] = Field(
        default=["main", "sub-agent", "compaction"], min_length=1, description="Kinds of calls that are trained."
    )
    correction_cap: float = Field(
        default=2.0, gt=0, description="Largest importance ratio: tis cuts there, mis and icepop count none above."
    )

    @property
    def by_token(self) -> bool:
        """Whether advantages differ from token to token before they are normalised."""
        return self.advantage in ("gae", "reinforce++")

    @property
    def learns_without_advantage(self) -> bool:
        """Whether tokens with advantage 0 have a gradient."""
        own = self.loss not in LOSSES
        return own or self.advantage == "gae" or self.entropy_coefficient > 0 or self.kl_in_loss

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_in == "loss"

    @property
    def prepares(self) -> bool:
        """Whether the learner computes something of a step's rows before the first update."""
        return self.proximal == "computed" or self.kl_coefficient > 0 or self.advantage == "gae"

    @model_validator(mode="after")
    def _consistent(self) -> Algorithm:
        for name, known in (("advantage", ADVANTAGES), ("loss", LOSSES)):
            value = getattr(self, name)
            if value not in known and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value):
                raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}, and no module:function")
        own_loss = self.loss not in LOSSES
        kl, gae, corrects, rejects = (
            self.kl_coefficient > 0,
            self.advantage == "gae",
            *(value != "none" for value in (self.correction, self.rejection)),
        )
        compared = self.advantage not in ("reinforce", "reinforce++", "gae") and self.group_size > 1
        needs = {
            "discount": (self.by_token, "advantage = 'reinforce++' or 'gae'"),
            "gae_lambda": (gae, "advantage = 'gae'"),
            "value_learning_rate": (gae, "advantage = 'gae'"),
            "value_coefficient": (gae, "advantage = 'gae'"),
            "value_clip": (gae, "advantage = 'gae'"),
            "overlong_tokens": (self.overlong_buffer > 0, "overlong_buffer"),
            "overlong_buffer": (self.overlong_tokens > 0, "overlong_tokens"),
            "overlong_penalty": (self.overlong_tokens > 0, "overlong_tokens"),
            "dual_clip": (own_loss or self.loss == "ppo_clip", "loss = 'ppo_clip'"),
            "ratio_cap": (own_loss or self.loss == "dppo_tv", "loss = 'dppo_tv'"),
            "normaliser_tokens": (self.normaliser == "constant", "normaliser = 'constant'"),
            "kl_reference": (kl, "kl_coefficient above 0"),
            "kl_in": (kl, "kl_coefficient above 0"),
            "kl_estimator": (kl, "kl_coefficient above 0"),
            "correction_level": (corrects, "a correction"),
            "correction_cap": (corrects, "a correction"),
            "correction_floor": (self.correction == "icepop", "correction = 'icepop'"),
            "rejection_low": (rejects, "a rejection"),
            "rejection_high": (rejects, "a rejection"),
            "dynamic_sampling": (compared, "an advantage relative to the group, and a group_size of at least 2"),
        }
        for name, (used, needed) in needs.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not used:
                raise ValueError(f"{name}: {value!r} needs {needed}")
        if self.normaliser == "constant" and not self.normaliser_tokens:
            raise ValueError("normaliser_tokens: normaliser = 'constant' needs a length of at least 1")
        if self.overlong_buffer > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer: {self.overlong_buffer} is more than overlong_tokens ({self.overlong_tokens})"
            )
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip: {self.dual_clip:g} would cut off every loss; give more than 1, or 0 for none")
        if self.correction == "icepop" and self.correction_floor >= self.correction_cap:
            raise ValueError(
                f"correction_floor: {self.correction_floor:g} is not below correction_cap ({self.correction_cap:g})"
            )
        if self.rejection_low >= self.rejection_high:
            raise ValueError(
                f"rejection_low: {self.rejection_low:g} is not below rejection_high ({self.rejection_high:g})"
            )
        if corrects and self.loss not in ("ppo_clip", "reinforce") and self.proximal == "sampled":
            raise ValueError(
                f"correction: loss = {self.loss!r} has the ratio to the policy sampled from in it already, and would count it "
                "twice; set proximal = 'computed', or leave the correction out"
            )
        if self.proximal == "computed" and self.loss == "reinforce" and not (corrects or rejects):
            raise ValueError("proximal: loss = 'reinforce' without a correction has no ratio; leave it out")
        return self


class Trainer(Section):
    steps: int = Field(default=100, ge=0, description="Steps of reinforcement learning.")
    max_seconds: float = Field(
        default=0.0, ge=0, description="Stop learning after this time (evaluation follows); 0 sets no limit."
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate of AdamW.")
    lr_warmup_steps: int = Field(default=0, ge=0, description="Updates over which the learning rate rises from 0.")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's betas.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay.")
    grad_clip: float = Field(default=1.0, ge=0, description="Largest gradient norm; 0 does not clip.")
    tokens_per_micro_batch: int = Field(
        default=4096, ge=1, description="Tokens, padding included, of one forward and backward pass."
    )
    checkpoint_every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0 writes only the last.")
    max_failed_groups: int = Field(default=8, ge=1, description="Failed groups in a row that end the run.")
    preflight: bool = Field(default=True, description="Run one attempt alone before the first step.")


class Eval(Section):
    untuned: bool = Field(default=False, description="Evaluate before the warm-up too.")
    untuned_tasks: int = Field(
        default=0, ge=0, description="Held-out tasks of the evaluation before the warm-up; 0 takes as many as tasks."
    )
    before: bool = Field(default=True, description="Evaluate before the first step.")
    after: bool = Field(default=True, description="Evaluate after the last step.")
    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0 evaluates only before and after.")
    tasks: int = Field(default=0, ge=0, description="Held-out tasks of an evaluation, from the first on; 0 takes all.")
    rollouts_per_task: int = Field(default=1, ge=1, description="Rollouts of each held-out task.")


class Tracking(Section):
    progress: Literal["auto", "live", "lines", "none"] = Field(
        default="auto", description="Progress on the screen: a live display, lines, or nothing."
    )
    tensorboard: bool = Field(default=False, description="Write TensorBoard files (needs the tensorboard package).")
    wandb: bool = Field(default=False, description="Log to Weights & Biases (needs the wandb package).")
    project: str = Field(default="longrein", description="Weights & Biases project.")


class Config(Section):
    """A whole run file."""

    run: Run = Field(default_factory=Run, description="The run and its folder.")
    model: Model = Field(default_factory=Model, description="The model that is trained or served.")
    engine: Engine = Field(default_factory=Engine, description="What samples tokens.")
    gateway: Gateway = Field(default_factory=Gateway, description="What stands where the model's endpoint is.")
    gate: Gate = Field(default_factory=Gate, description="What happens to calls while the model is updated.")
    store: Store = Field(default_factory=Store, description="The durable record.")
    agent: Agent = Field(default_factory=Agent, description="The harness and how it is run.")
    sandbox: Sandbox = Field(
        default_factory=Sandbox, description="Limits of an attempt in a sandbox (agent.sandbox = 'bubblewrap')."
    )
    workspace: Workspace = Field(
        default_factory=Workspace, description="What of agent.workspace an agent finds in its working directory."
    )
    task: Task = Field(default_factory=Task, description="What the harness is run on.")
    reward: Reward = Field(default_factory=Reward, description="Who grades and how.")
    audit: Audit = Field(default_factory=Audit, description="What agents try that they should not.")
    warmup: Warmup = Field(default_factory=Warmup, description="Supervised start from a teacher's rollouts.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="Advantage and loss.")
    trainer: Trainer = Field(default_factory=Trainer, description="Optimizer, steps and checkpoints.")
    eval: Eval = Field(default_factory=Eval, description="Held-out evaluation.")
    tracking: Tracking = Field(default_factory=Tracking, description="Where progress is shown and metrics go.")

    @model_validator(mode="after")
    def _whole(self) -> Config:
        if self.gateway.host not in ("127.0.0.1", "localhost", "::1") and not (
            self.gateway.key or self.gateway.key_file
        ):
            raise ValueError(
                f"gateway.host: {self.gateway.host!r} can be reached from other machines; set gateway.key or gateway.key_file"
            )
        if self.engine.kind == "openai" and not self.engine.url:
            raise ValueError("engine.url: engine.kind = 'openai' needs the endpoint's URL")
        if self.engine.url and self.engine.kind in ("vllm", "sglang"):
            raise ValueError(
                f"engine.url: is of kind openai; name the servers of kind {self.engine.kind} by engine.urls"
            )
        if self.engine.urls and self.engine.kind not in ("vllm", "sglang"):
            raise ValueError(f"engine.urls: are servers of kind vllm or sglang; engine.kind is {self.engine.kind!r}")
        if wrong := [url for url in self.engine.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"engine.urls: {wrong[0]!r} is no http:// or https:// URL")
        if self.engine.kind in ("vllm", "sglang") and not self.model.path:
            raise ValueError(
                f"model.path: engine.kind = {self.engine.kind!r} needs the model's folder or hub name: prompts are "
                "rendered and encoded here"
            )
        if self.engine.kind == "scripted" and not self.engine.script:
            raise ValueError("engine.script: engine.kind = 'scripted' needs module:function")
        if self.store.keep != "all" and not self.trainer.checkpoint_every:
            raise ValueError(
                f"store.keep: {self.store.keep!r} removes only what a checkpoint has got past; set trainer.checkpoint_every"
            )
        if self.agent.max_tokens and (not self.model.path or self.engine.kind == "openai"):
            raise ValueError(
                "agent.max_tokens: tokens are counted where replies are sampled token by token, which needs model.path and an "
                "engine.kind other than openai; leave it out"
            )
        if self.engine.kind == "simulated" and not self.model.path:
            raise ValueError(
                "model.path: engine.kind = 'simulated' needs a folder with a tokenizer and a chat template"
            )
        if self.engine.kind != "simulated" and self.engine.simulated != Simulated():
            raise ValueError(f"engine.simulated: is for engine.kind = 'simulated', which is {self.engine.kind!r}")
        if self.engine.kind != "vllm" and self.gate.in_flight == "drain":
            raise ValueError(
                "gate.in_flight: only vLLM servers can be drained; the embedded engine freezes at a token boundary"
            )
        if self.engine.kind == "vllm" and self.gate.kv_after_update == "keep":
            raise ValueError(
                "gate.kv_after_update: vLLM cannot forget the keys and values of finished calls while it keeps those of "
                "running ones; use recompute"
            )
        if self.agent.command and self.agent.agent_class:
            raise ValueError("agent.command: give agent.command or agent.agent_class, not both")
        if self.audit.action == "off" and self.audit.actions:
            raise ValueError("audit.actions: audit.action = 'off' looks for nothing; leave out one of them")
        if self.agent.preload and self.agent.sandbox != "none":
            raise ValueError(
                "agent.preload: agents in a sandbox are started afresh and never forked from a preloaded parent; leave out "
                "agent.preload or agent.sandbox"
            )
        if self.agent.user == "root" and self.agent.sandbox != "none":
            raise ValueError("agent.user: agents in a sandbox are never root; leave out agent.user or agent.sandbox")
        if not re.fullmatch(r"hide|squash|keep|\{task\.[^{}]+\}", self.workspace.git):
            raise ValueError(f"workspace.git: {self.workspace.git!r} is none of hide, squash, keep and {{task.FIELD}}")
        if self.warmup.steps and not (self.warmup.teacher or self.warmup.teacher_url):
            raise ValueError("warmup.teacher: warmup.steps > 0 needs warmup.teacher or warmup.teacher_url")
        if self.warmup.teacher and self.warmup.teacher_url:
            raise ValueError("warmup.teacher: give warmup.teacher or warmup.teacher_url, not both")
        if self.warmup.steps and not self.task.dev:
            raise ValueError("task.dev: warmup.steps > 0 needs tasks for its success check")
        return self


def load(path: str | os.PathLike[str] | None, overrides: Iterable[str] = ()) -> Config:
    """Read a run file (or none: all defaults) and apply `section.key=value` overrides.

    Relative files and folders named in a run file are meant from the run file's folder, those in an override from the
    current one; they are made absolute here, and so is `run.folder`. Raises `ConfigError` with one line per problem.
    """
    values: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such run file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file}: not valid TOML: {error}") from None
        _anchor(values, file.resolve().parent)
        run = values.setdefault("run", {})
        if isinstance(run, dict) and not run.get("folder"):
            run["folder"] = str(file.resolve().parent)
    for override in overrides:
        _override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise ConfigError("\n".join(where + line for line in _explain(error))) from None


# Options that name a file or folder: relative ones are meant from the run file's folder.
_FILES = {("run", "folder"), ("model", "chat_template"), ("gateway", "key_file"), ("agent", "workspace")}
_FILES_OR_FUNCTIONS = {("task", "train"), ("task", "dev"), ("task", "held_out"), ("model", "path")}


def _anchor(values: dict[str, Any], folder: Path) -> None:
    for section, key in _FILES | _FILES_OR_FUNCTIONS:
        table = values.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        if not isinstance(value, str) or not value or value.startswith(("/", "~")):
            continue
        # A hub name or module:function stays as it is; what exists beside the run file, or says ./, is a file.
        is_file = (
            (section, key) in _FILES or value.startswith(".") or value.endswith(".jsonl") or (folder / value).exists()
        )
        if is_file:
            assert isinstance(table, dict)
            table[key] = str((folder / value).resolve())
    audit = values.get("audit")
    if isinstance(audit, dict) and isinstance(audit.get("rules"), list):
        files = [os.path.expanduser(file) if isinstance(file, str) else file for file in audit["rules"]]
        audit["rules"] = [str((folder / file).resolve()) if isinstance(file, str) else file for file in files]
    agent = values.get("agent")
    if isinstance(agent, dict) and isinstance(agent.get("expose"), list):
        agent["expose"] = [
            str(folder / os.path.expanduser(path)) if isinstance(path, str) else path for path in agent["expose"]
        ]
    for section, key in (("model", "path"), ("gateway", "key_file"), ("run", "folder")):
        table = values.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = os.path.expanduser(table[key])


def _override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2:
        raise ConfigError(f"--set {override}: expected section.key=value")
    table = values
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # bare words are strings: --set model.name=policy
    anchored = {parts[0]: {parts[-1]: value}}
    if len(parts) == 2:
        _anchor(anchored, Path.cwd())
    table[parts[-1]] = anchored[parts[0]][parts[-1]]


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        name = ".".join(location)
        if problem["type"] == "extra_forbidden":
            lines.append(f"{name}: unknown option{_nearest(location)}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            # A section's own check begins with the option it is about.
            inner = problem["type"] == "value_error" and re.match(r"[a-z_]+: ", message)
            lines.append(f"{name}.{message}" if name and inner else f"{name}: {message}" if name else message)
    return lines


def _nearest(location: list[str]) -> str:
    known = _known_names(Config)
    name = ".".join(location)
    same_key = [k for k in known if k.rsplit(".", 1)[-1] == location[-1]]
    close = same_key[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        parent = ".".join(location[:-1])
        siblings = [k.removeprefix(parent + ".") for k in known if k.startswith(parent + ".") or not parent]
        close_sibling = difflib.get_close_matches(location[-1], siblings, n=1, cutoff=0.4)
        close = [f"{parent}.{close_sibling[0]}".lstrip(".")] if close_sibling else []
    return f"; did you mean {close[0]}?" if close else "; `longrein config --defaults` lists every option"


def _section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _known_names(model: type[Section], prefix: str = "") -> list[str]:
    names = []
    for field, info in model.model_fields.items():
        name = prefix + (info.alias or field)
        names.append(name)
        inner = _section_of(info.annotation)
        if inner is not None:
            names.extend(_known_names(inner, name + "."))
    return names


def resolved_toml(config: Config) -> str:
    """The whole configuration as TOML that `load` reads back to an equal one. The run key is left out."""
    values = config.model_dump(mode="json", by_alias=True)
    values["gateway"]["key"] = ""
    return "\n".join(_toml_section(name, table) for name, table in values.items()) + "\n"


def _toml_section(name: str, table: dict[str, Any]) -> str:
    plain = [f"{key} = {_toml_value(value)}" for key, value in table.items() if not _is_table(name, key)]
    nested = [_toml_section(f"{name}.{key}", value) for key, value in table.items() if _is_table(name, key)]
    return "\n".join([f"[{name}]", *plain, "", *nested]).rstrip("\n") + "\n"


def _is_table(section: str, key: str) -> bool:
    return f"{section}.{key}" in ("model.lora", "engine.simulated")


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"{type(value).__name__} has no TOML form here")


def defaults_text() -> str:
    """Every option with its default and one line of meaning, as a run file of comments and defaults."""
    lines: list[str] = []
    for name, info in Config.model_fields.items():
        section = _section_of(info.annotation)
        assert section is not None
        lines.extend(_defaults_of(name, info.description or "", section))
    return "\n".join(lines)


def _defaults_of(name: str, description: str, section: type[Section]) -> list[str]:
    lines = [f"[{name}]", f"# {description}"]
    nested: list[str] = []
    for field, info in section.model_fields.items():
        key = info.alias or field
        inner = _section_of(info.annotation)
        if inner is not None:
            nested.extend(_defaults_of(f"{name}.{key}", info.description or "", inner))
            continue
        value = info.get_default(call_default_factory=True)
        value = list(value) if isinstance(value, tuple) else value
        choices = f" One of: {', '.join(get_args(info.annotation))}." if get_origin(info.annotation) is Literal else ""
        lines.append(f"{key} = {_toml_value(value)}  # {info.description}{choices}")
    return [*lines, "", *nested]

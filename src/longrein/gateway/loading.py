"""A `TextModel` from a Hugging Face model folder: what is read, and what is probed before the first request needs it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from longrein.config import ConfigError
from longrein.gateway.tokens import Rendered, TemplateError, TextModel

Json = dict[str, Any]

log = logging.getLogger("longrein.gateway")


def model_folder(path: str) -> Path:
    """The folder of a model given as a folder or a hub name. Raises `ConfigError` when there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            f"model.path: {path}: no such folder; give a Hugging Face model folder or a hub name (owner/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [
        "tokenizer*",
        "*.jinja",
        "special_tokens_map.json",
        "config.json",
        "generation_config.json",
        "chat_template*",
    ]
    try:
        return Path(snapshot_download(path, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: {path}: neither a folder nor a hub model that can be fetched: {error}"
        ) from None


def load_text_model(
    path: str,
    *,
    name: str = "policy",
    chat_template: str = "",
    context: int = 0,
    control_text: Literal["text", "refuse", "special"] = "text",
    system_messages: Literal["auto", "template", "user"] = "auto",
) -> TextModel:
    """Read tokenizer, template and limits from a Hugging Face model folder.

    Raises `ConfigError` naming the file when something is missing, when the template has no generation prompt, or
    when it cannot be compiled.
    """
    folder = model_folder(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{folder}: no tokenizer.json; Longrein needs the model's fast tokenizer")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    variables = _special_variables(settings, _read_json(folder / "special_tokens_map.json"))
    sources = _template_sources(folder, settings, chat_template)
    environment = _environment()
    try:
        templates = {key: environment.from_string(source) for key, source in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{chat_template or folder}: the chat template does not compile: line {error.lineno}: {error}"
        ) from None
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    limit = text_config.get("max_position_embeddings") if isinstance(text_config, dict) else None
    model = TextModel(
        name=name,
        tokenizer=tokenizer,
        templates=templates,
        variables=variables,
        stop_ids=_stop_ids(tokenizer, variables, generation, config),
        context=context or (limit if isinstance(limit, int) else None),
        control_text=control_text,
        source="\n".join(sources.values()),
    )
    _probe(model, folder, system_messages)
    return model


def _probe(model: TextModel, folder: Path, system_messages: str) -> None:
    """Find out what the template and the tokenizer do before the first request depends on it."""
    user = [{"role": "user", "content": "Hello"}]
    said = {"role": "assistant", "content": "Yes."}
    try:
        without = model.render(user, None, generation_prompt=False).text
        with_prompt = model.render(user, None).text
        answered = model.render([*user, said], None, generation_prompt=False).text
        turns = model.render([*user, said, *user], None)
    except TemplateError as error:
        raise ConfigError(f"{folder}: the chat template refuses plain turns of user and assistant: {error}") from None
    if not with_prompt.startswith(without) or (with_prompt == without and not _answers_at_once(without, answered)):
        raise ConfigError(
            f"{folder}: the chat template has no generation prompt: it gives the same text with and without "
            "add_generation_prompt, so the model would not know that it is its turn; set model.chat_template"
        )
    model.generation_prompt = with_prompt[len(without) :]
    if not model.stop_ids:
        raise ConfigError(
            f"{folder}: no end token: generation_config.json or tokenizer_config.json has to name an eos token"
        )
    system = {"role": "system", "content": "Be brief."}
    if system_messages == "user":
        model.turn_system_into_user = True
    elif system_messages == "auto":
        model.turn_system_into_user = not _takes(model, [system, *user])
        # The roles alternate here once the second one has become the user's.
        later = [system, *user, said, system]
        model.turn_later_system_into_user = not model.turn_system_into_user and not _takes(model, later, times=2)
        if model.turn_later_system_into_user:
            log.info("system messages but the first are written as the user's: the template takes them nowhere else")
    sample = '  Två  (ö) \n\n\t{"a": 1}  naïve, 東京 🙂 don\'t e\u0301 \u2581 '
    model.exact = all(model.decode(model.encode(text)) == text.text for text in (Rendered(sample), turns))
    _probe_calls(model, user)


def _answers_at_once(asked: str, answered: str) -> bool:
    """Whether the user's turn has an end behind which the answer stands without a header, as Mistral's [/INST]."""
    ended = asked.rpartition("Hello")[2].strip() != ""
    return ended and answered.startswith(asked) and answered[len(asked) :].lstrip().startswith("Yes.")


def _probe_calls(model: TextModel, user: list[Json]) -> None:
    """Which form of tool calls the template takes. Where it takes none it says so itself when a harness sends one."""
    for text_arguments in (False, True):
        for id in ("call_0123456789abcdef", "abcdef012"):
            call = {"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            model.text_arguments = text_arguments
            if _takes(model, [*user, {"role": "assistant", "content": "", "tool_calls": [call]}]):
                model.short_call_ids = len(id) == 9
                return
    model.text_arguments = False


def _takes(model: TextModel, messages: list[Json], times: int = 0) -> bool:
    """Whether the template takes `messages`, and writes the system message at least `times` times."""
    try:
        return model.render(messages, None).text.count("Be brief.") >= times
    except TemplateError:
        return False


def _read_json(file: Path) -> Json:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _special_variables(settings: Json, special: Json) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
    found: dict[str, str] = {}
    for key in names:
        value = settings.get(key, special.get(key))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _stop_ids(tokenizer: tokenizers.Tokenizer, variables: Mapping[str, str], *configs: Json) -> frozenset[int]:
    ids: set[int] = set()
    eos = variables.get("eos_token")
    if eos is not None and (id := tokenizer.token_to_id(eos)) is not None:
        ids.add(id)
    for config in configs:
        value = config.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return frozenset(ids)


def _template_sources(folder: Path, settings: Json, chat_template: str) -> dict[str, str]:
    if chat_template:
        try:
            return {"default": Path(chat_template).read_text(encoding="utf-8")}
        except OSError as error:
            raise ConfigError(f"model.chat_template: {chat_template}: cannot be read: {error}") from None
    if (folder / "chat_template.jinja").is_file():
        sources = {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[extra.stem] = extra.read_text(encoding="utf-8")
        return sources
    value = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        sources = {entry["name"]: entry["template"] for entry in value}
        if "default" in sources:
            return sources
    raise ConfigError(f"{folder}: no chat template; give one by model.chat_template (a Jinja file)")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part in some templates; its body is plain output here."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which looks into a dict without raising and catching an error first; templates do little else."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment

"""Guides looked at before they are used: whether llguidance can follow them, and whether a given reply does.

llguidance is an extra (`pip install 'longrein[guided]'`). Without it here, a guide goes to the engine as it is, and what
the engine says of it goes back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from longrein.gateway.dialects import DialectError, Request
from longrein.gateway.guides import Form, hermes_guide, thinking_of
from longrein.gateway.tokens import TextModel

NOT_INSTALLED = "llguidance is not installed (pip install 'longrein[guided]')"


def installed() -> bool:
    """Whether llguidance can be imported."""
    return find_spec("llguidance") is not None


def guide_of(request: Request, model: TextModel, prompt_tail: str, without: str | None) -> str | None:
    """The guide that a request's reply has to follow; None when its form is free.

    `without` says why there is no guided decoding, if there is none. Raises `DialectError` that names the field.
    """
    form = request.form
    if form is None:
        return None
    if without is not None:
        raise DialectError(
            400,
            f"{form.said} needs guided decoding: {without}",
            param=form.field,
            code="unsupported_parameter",
        )
    _check_schemas(form)
    tokens = [token.content for token in model.tokenizer.get_added_tokens_decoder().values()]
    return hermes_guide(form, thinking_of(prompt_tail, model.source), tokens)


def _check_schemas(form: Form) -> None:
    if not installed():
        return
    for schema in form.schemas():
        fault = _fault(json.dumps(schema.guided()))
        if fault:
            raise DialectError(
                400,
                f"{schema.field}: llguidance cannot follow this schema: {fault}",
                param=schema.field,
                code="invalid_json_schema",
            )


@lru_cache(maxsize=1024)
def _fault(schema: str) -> str:
    """What llguidance has against a JSON schema; empty when it can follow it."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


@dataclass
class GuideChecker:
    """Says whether replies follow guides, by the model's tokenizer."""

    model: TextModel
    _tokenizer: Any = None

    def departure(self, guide: str, ids: Sequence[int], whole: bool) -> str | None:
        """Where `ids`, without the token that stops them, leave the guide; None when they follow it to their end.

        `whole`: whether the reply has to be finished there.
        """
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(self.model.tokenizer.to_str(), eos_token=min(self.model.stop_ids))
        matcher = LLMatcher(self._tokenizer, guide, log_level=0)
        if matcher.is_error():
            return f"llguidance cannot follow the guide: {matcher.get_error()}"
        followed = matcher.try_consume_tokens(list(ids))
        if followed < len(ids):
            before, at = self.model.decode(ids[:followed]), self.model.decode(ids[followed : followed + 1])
            return f"after {before[-40:]!r} it may not say {at!r}"
        if whole and not matcher.is_accepting():
            return f"after {self.model.decode(ids)[-40:]!r} it may not end"
        return None

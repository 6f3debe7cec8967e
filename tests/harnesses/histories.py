"""What the record of a run would be under another `gateway.history`.

A harness's requests do not depend on it as long as the replies are the same, and the script's are: so the gateway's own
planning is applied to what the harness really sent, without running it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from longrein.gateway.conversation import History, plan_prompt
from longrein.gateway.messages import Message
from longrein.gateway.tokens import Rendered, TextModel
from longrein.records import Call
from longrein.trajectory.prompts import messages_of, tools_of


def replanned(calls: Sequence[Call], model: TextModel, history: str) -> list[Call]:
    """The answered calls as `history` (faithful, sampled or rendered) records them.

    Their numbers count anew: calls that were not answered are left out.
    """
    by_number = {call.number: call for call in calls}
    known = History()
    out: list[Call] = []
    for call in (call for call in calls if call.status == "ok"):
        messages = [Message.from_json(message) for message in messages_of(by_number, call)]
        tools = tools_of(by_number, call)

        def render(messages: Sequence[Message], generation_prompt: bool, tools=tools) -> Rendered:
            return model.render([m.for_template() for m in messages], tools, generation_prompt=generation_prompt)

        plan = plan_prompt(known, model, messages, tools, render, history)
        recorded = known.admit(plan, messages, tools, call.kind)
        known.add(recorded, model, list(call.sampled), Message.from_json(call.reply))
        out.append(
            msgspec.structs.replace(
                call,
                number=recorded.number,
                parent=plan.parent.number if plan.parent is not None else None,
                fork=plan.fork,
                prefix=plan.prefix.number if plan.prefix is not None else None,
                prefix_length=plan.prefix_length,
                prompt_delta=plan.new_ids,
                prompt_length=plan.length,
                messages_keep=plan.messages_keep,
                messages=[message.to_json() for message in messages[plan.messages_keep :]],
                tools=tools,
            )
        )
    return out

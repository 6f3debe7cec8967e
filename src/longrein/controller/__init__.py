"""From a queued rollout to a graded one: starts harnesses and graders, and talks to the gateway as any client would."""

"""Rewards: functions of (answer text, what is expected) that an evaluator calls. Pick one by name from `REWARDS`.

Owns: the names. Importing this package imports no reward; `process` runs evaluators in processes that can be killed.
"""

from __future__ import annotations

REWARDS: dict[str, str] = {
    "code": "minirllm.rewards.code:code",
    "countdown": "minirllm.rewards.countdown:countdown",
    "exact": "minirllm.rewards.exact:exact",
    "math": "minirllm.rewards.math:math",
    "number": "minirllm.rewards.exact:number",
}

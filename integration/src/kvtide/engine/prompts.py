"""What the trained models are asked to continue: wording of licences and of Python's documentation, in ASCII.

The order makes pressure. Three long prompts fill full attention, and the last of them stays; short ones follow in a crowd,
which want windows and state slots where the long ones have left holes; then it starts again.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Prompt:
    """A text and how much is to follow."""

    text: str
    """ASCII; one byte is one token."""

    output_tokens: int
    """Bytes to generate, unless `stop` comes before."""

    stop: str = ""
    """What ends the output; nothing if empty."""


@attrs.frozen
class FollowUp:
    """A prompt that begins as another does, and comes while that one's memory may still be there."""

    behind: int
    """Arrives with the prompt of this place."""

    of: int
    """Begins as the prompt of this place."""

    shared_tokens: int
    """Tokens that both have."""

    text: str
    """What comes then; one byte is one token."""

    output_tokens: int
    """Bytes to generate."""


PROMPTS = (
    Prompt(
        "Redistribution and use in source and binary forms, with or without modification, are permitted provided that the "
        "following conditions are met: Redistributions of source code must retain the above copyright notice, this list of "
        "conditions and the following ",
        34,
    ),
    Prompt(
        'THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO '
        "THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR ",
        28,
    ),
    Prompt(
        "Subject to the terms and conditions of this License, each Contributor hereby grants to You a perpetual, worldwide, "
        "non-exclusive, no-charge, royalty-free, irrevocable copyright license to reproduce, prepare ",
        52,
    ),
    Prompt("Return a ", 18),
    Prompt("If the ", 17),
    Prompt("The name of ", 16),
    Prompt("This License ", 18, stop=" to"),
    Prompt("Raise an ", 16),
    Prompt("You may ", 17),
    Prompt("A copy of ", 16, stop="ic"),
    Prompt("T", 17),
    Prompt("Create a new ", 17),
    Prompt("Permission is hereby granted, free of charge, to any person obtaining a copy of this ", 24),
    Prompt(
        "When we speak of free software, we are referring to freedom, not price. Our General Public Licenses are designed to "
        "make sure that you have the freedom to distribute copies of ",
        30,
    ),
    Prompt("Return a string which is the concatenation of the strings in ", 20),
    Prompt("The above copyright notice ", 1),
    Prompt("Derivative ", 22),
)
"""In order of arrival; some are longer than the models' 16-token window many times over, some never fill it."""

FOLLOW_UPS = (
    FollowUp(behind=3, of=0, shared_tokens=178, text="the name of ", output_tokens=16),
    FollowUp(behind=5, of=2, shared_tokens=150, text="to use the ", output_tokens=18),
    FollowUp(behind=7, of=2, shared_tokens=171, text="of the ", output_tokens=14),
    FollowUp(behind=15, of=13, shared_tokens=116, text="to use the ", output_tokens=16),
)
"""Beside `PROMPTS`, where prefixes are shared."""

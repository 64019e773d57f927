#!/usr/bin/env python
"""A ReAct agent of Lagent on a model trained here: its training data, and questions to it.

  agent.py data DIR [--count N]     write calls.jsonl, conversations in which the assistant looks up
                                    a stock, and text.jsonl for the training of a tokenizer
  agent.py ask URL [QUESTION ...]   ask a server of tools/serve.py by Lagent's ReAct and GPTAPI

In the conversations the numbers are random, and those of `ask` follow from --seed: an answer with
the right number comes from the tool. `data` needs Python alone, `ask` Lagent (pip install
lagent==0.2.4).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

SYSTEM = "Use the tool Stock to look up numbers."
NAME = "internlm-stock"  # GPTAPI takes names that begin with gpt, internlm or qwen
ITEMS = (
    "apples pears plums figs lemons onions carrots beans peas leeks nuts eggs loaves pans cups "
    "plates forks spoons knives bowls lamps chairs tables rugs clocks books pens maps hats gloves"
).split()
QUESTIONS = ("How many {} do we have?", "What is the stock of {}?", "Count the {}, please.")
SMALL_TALK = {
    "Hello": "Hello, what shall I look up?",
    "Who are you?": "I am a small model with a tool.",
    "Thank you": "You are welcome.",
}
ASKED = [
    "How many lemons do we have?",
    "What is the stock of clocks?",
    "Count the eggs, please.",
    "Who are you?",
]


def draw_number(draw: random.Random) -> int:
    """A stock."""
    return draw.randint(10, 99)


def tool_answer(item: str, number: int) -> str:
    """What the tool says."""
    return f" We have {number} {item}."


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """The messages that Lagent's ReAct sends and gets for one question."""
    messages = [{"role": "system", "content": SYSTEM}]
    if draw.random() < 0.05:
        question, answer = draw.choice(sorted(SMALL_TALK.items()))
        return [
            *messages,
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"Thought:No tool needed.\nFinal Answer: {answer}"},
        ]
    item = draw.choice(ITEMS)
    number = draw_number(draw)
    call = json.dumps({"item": item})
    return [
        *messages,
        {"role": "user", "content": draw.choice(QUESTIONS).format(item)},
        {
            "role": "assistant",
            "content": f"Thought:I need the tool.\nAction:Stock\nAction Input:{call}",
        },
        {"role": "system", "content": f"Response:{tool_answer(item, number)}\n"},
        {
            "role": "assistant",
            "content": f"Thought:I know it.\nFinal Answer:{tool_answer(item, number)}",
        },
    ]


def write(folder: Path, count: int) -> None:
    """calls.jsonl: so many conversations. text.jsonl: their text with the tags of the template
    zephyr."""
    draw = random.Random(1234)
    with open(folder / "calls.jsonl", "w") as calls, open(folder / "text.jsonl", "w") as text:
        for _ in range(count):
            messages = conversation(draw)
            calls.write(json.dumps({"messages": messages}) + "\n")
            turns = "".join(f"<|{each['role']}|>\n{each['content']}\n" for each in messages)
            text.write(json.dumps({"text": turns}) + "\n")


def ask(url: str, questions: list[str], seed: int) -> None:
    """Print what the agent does for each question."""
    from lagent.actions import ActionExecutor, BaseAction
    from lagent.agents.react import ReAct, ReActProtocol
    from lagent.llms import GPTAPI

    draw = random.Random(seed)
    stock = {item: draw_number(draw) for item in ITEMS}

    class Stock(BaseAction):
        """Knows how many there are of an item."""

        def run(self, item: str) -> str:
            """Look up a number.

            Args:
                item (str): the item, in the plural
            """
            return tool_answer(item, stock[item])

    model = GPTAPI(
        NAME,
        key="none",
        openai_api_base=f"{url}/v1/chat/completions",
        query_per_second=50,
        temperature=0.0,
        max_new_tokens=64,
    )
    # ReAct's own instruction has 100 words; a tiny model is trained on a short one
    protocol = ReActProtocol(call_protocol=SYSTEM, force_stop="Answer now.")
    agent = ReAct(model, ActionExecutor([Stock()]), protocol)
    for question in questions:
        print(f"\nquestion: {question}")
        answer = agent.chat(question)
        for action in answer.actions:
            if action.type == "Stock":
                print(f"tool call: Stock({action.args}): {action.errmsg or action.format_result()}")
        print(f"answer: {answer.response.strip()}", flush=True)


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 1 Lagent is missing, 2 a wrong command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="write training conversations")
    data.add_argument("folder", type=Path, metavar="DIR")
    data.add_argument("--count", type=int, default=4000, help="conversations")
    asking = commands.add_parser("ask", help="ask a server")
    asking.add_argument("url", help="such as http://127.0.0.1:8000")
    asking.add_argument("questions", nargs="*", default=ASKED, help="questions")
    asking.add_argument("--seed", type=int, default=7, help="of the numbers that the tool knows")
    options = parser.parse_args(argv)
    if options.command == "data":
        write(options.folder, options.count)
        return 0
    try:
        ask(options.url, options.questions, options.seed)
    except ImportError as error:
        print(f"error: ask needs Lagent ({error}); run: pip install lagent==0.2.4", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Conversations with tools: choose one of those on offer, fill in its parameters, read its result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chat import (
    Conversation,
    Message,
    capitalised,
    made_up,
    say,
    small_talk,
    some_city,
    some_name,
    talk,
    user,
)
from chat_words import CURRENCIES, ENDINGS, FILES, FOLDERS, NOUNS, TOPICS, VERBS, WEATHER

Random = random.Random


@dataclass(frozen=True)
class Use:
    """A question that one call answers."""

    tool: dict[str, Any]
    asked: str
    arguments: dict[str, Any]
    result: str
    answer: str


def _tool(name: str, description: str, required: int | None = None, **parameters: tuple[str, str]) -> dict[str, Any]:
    """parameters: name -> (type, description); the first ``required`` of them are required, all by default."""
    properties = {key.rstrip("_"): {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    names = list(properties)
    schema = {"type": "object", "properties": properties, "required": names[:required]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def weather(rng: Random) -> Use:
    city, sky, degrees = some_city(rng), rng.choice(WEATHER), rng.randrange(-9, 36)
    tool = _tool(
        "get_weather",
        rng.choice(("Get the current weather", "Get the current weather in a city", "Current weather of a city.")),
        1,
        city=("string", rng.choice(("The city", "The name of the city", "City name"))),
        **({"unit": ("string", "celsius or fahrenheit")} if rng.random() < 0.4 else {}),
    )
    unit = {"unit": "celsius"} if "unit" in str(tool) and rng.random() < 0.5 else {}
    asked = rng.choice(
        (
            "What is the weather in {}?",
            "How is the weather in {}?",
            "What is the weather like in {} today?",
            "Is it raining in {}?",
            "Weather in {}?",
            "Please tell me the weather in {}.",
            "Do I need an umbrella in {}?",
            "Should I take a coat? I am going to {}.",
        )
    ).format(city)
    if unit:
        asked += " Use celsius."
    result = rng.choice(
        (
            json.dumps({"city": city, "temperature": degrees, "condition": sky}),
            json.dumps({"temperature": degrees, "condition": sky}),
            f"{sky}, {degrees} degrees",
            f"{degrees} degrees, {sky}",
        )
    )
    return Use(tool, asked, {"city": city, **unit}, result, f"In {city} it is {degrees} degrees: {sky}.")


def calculator(rng: Random) -> Use:
    a, b = rng.randrange(2, 1000), rng.randrange(2, 1000)
    operator, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    tool = _tool(
        rng.choice(("calculate", "calculator")),
        rng.choice(("Evaluate an arithmetic expression", "A calculator.", "Compute the value of an expression")),
        expression=("string", rng.choice(("The expression", "An expression such as 2 + 3"))),
    )
    text = f"{a} {operator} {b}"
    asked = rng.choice(("What is {}?", "Calculate {}.", "How much is {}?", "Compute {}.", "Use the calculator: {}"))
    return Use(tool, asked.format(text), {"expression": text}, str(value), f"{text} = {value}.")


def _path(rng: Random) -> str:
    stem = made_up(rng).lower() if rng.random() < 0.3 else rng.choice(FILES)
    folder = f"{rng.choice(FOLDERS)}/" if rng.random() < 0.6 else ""
    return f"{folder}{stem}.{rng.choice(ENDINGS)}"


def read_file(rng: Random) -> Use:
    path, number, topic = _path(rng), rng.randrange(100), rng.choice(TOPICS)
    content = rng.choice(
        (f"The {rng.choice(NOUNS)} is in box {number}.", f"Notes about {topic}.", f"version = {number}")
    )
    tool = _tool(
        "read_file", rng.choice(("Read a file", "Read the content of a file")), path=("string", "Path of the file")
    )
    asked = rng.choice(
        ("Read {}.", "What is in the file {}?", "Show me {}.", "Please open {} and tell me what it says.")
    )
    return Use(tool, asked.format(path), {"path": path}, content, f"The file {path} says: {content}")


def write_file(rng: Random) -> Use:
    path, text = _path(rng), f"{rng.choice(NOUNS)} {rng.choice(NOUNS)} {rng.randrange(100)}"
    tool = _tool(
        "write_file",
        rng.choice(("Write a file", "Write text to a file")),
        path=("string", "Path of the file"),
        content=("string", "The text"),
    )
    asked = rng.choice(('Write "{1}" to {0}.', 'Save the text "{1}" in the file {0}.', 'Put "{1}" into {0}.'))
    return Use(tool, asked.format(path, text), {"path": path, "content": text}, "ok", f"I wrote the text to {path}.")


def list_files(rng: Random) -> Use:
    folder = rng.choice(FOLDERS)
    names = [f"{rng.choice(FILES)}.{rng.choice(ENDINGS)}" for _ in range(rng.randint(1, 4))]
    tool = _tool("list_files", "List the files of a folder", path=("string", "Path of the folder"))
    asked = rng.choice(("Which files are in {}?", "List the files in {}.", "What is in the folder {}?")).format(folder)
    return Use(
        tool, asked, {"path": folder}, json.dumps(names), f"The folder {folder} has {len(names)}: {', '.join(names)}."
    )


def clock(rng: Random) -> Use:
    city, time = some_city(rng), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    tool = _tool("get_time", rng.choice(("Get the local time of a city", "Current time")), city=("string", "The city"))
    asked = rng.choice(("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?")).format(city)
    return Use(tool, asked, {"city": city}, time, f"It is {time} in {city}.")


def convert(rng: Random) -> Use:
    source, target = rng.sample(CURRENCIES, 2)
    amount, value = rng.randrange(1, 500), rng.randrange(100, 90000) / 100
    tool = _tool(
        "convert_currency",
        "Convert an amount of money",
        amount=("number", "The amount"),
        from_=("string", "Currency code"),
        to=("string", "Currency code"),
    )
    asked = rng.choice(("How much is {} {} in {}?", "Convert {} {} to {}.", "What are {} {} in {}?"))
    arguments = {"amount": amount, "from": source, "to": target}
    return Use(
        tool, asked.format(amount, source, target), arguments, str(value), f"{amount} {source} are {value} {target}."
    )


def send_message(rng: Random) -> Use:
    name, text = some_name(rng), f"the {rng.choice(NOUNS)} is ready"
    tool = _tool(
        "send_message", "Send a message to a person", to=("string", "Who gets it"), text=("string", "The message")
    )
    asked = rng.choice(("Tell {} that {}.", "Send a message to {}: {}", "Please write to {} that {}.")).format(
        name, text
    )
    return Use(tool, asked, {"to": name, "text": text}, "sent", f"I sent the message to {name}.")


def search(rng: Random) -> Use:
    topic = rng.choice((*TOPICS, made_up(rng), some_city(rng)))
    found = f"{capitalised(topic)}: {rng.randrange(2, 90)} pages found, the first one is about {rng.choice(NOUNS)}s."
    tool = _tool(
        rng.choice(("search", "web_search")),
        rng.choice(("Search the web", "Search for pages about something")),
        query=("string", "What to look for"),
    )
    asked = rng.choice(("Search for {}.", "Find something about {}.", "Look up {}.", "What can you find about {}?"))
    return Use(tool, asked.format(topic), {"query": topic}, found, f"I found this: {found}")


def unknown(rng: Random) -> Use:
    """A tool that exists only here: its name and parameters must be read from the schema."""
    verb, noun, number = rng.choice(VERBS), rng.choice(NOUNS), rng.randrange(1000)
    key = rng.choice((f"{noun}_id", "id", "number", noun))
    parameters: dict[str, tuple[str, str]] = {key: ("integer", f"Which {noun}")}
    arguments: dict[str, Any] = {key: number}
    asked = rng.choice(
        ("{v} {n} {i}.", "Please {v} {n} {i}.", "Can you {v} {n} number {i}?", "{v} the {n} with number {i}.")
    )
    text = capitalised(asked.format(v=verb, n=noun, i=number))
    if rng.random() < 0.4:
        parameters["owner"], arguments["owner"] = ("string", f"Who owns the {noun}"), some_name(rng)
        text += f" It belongs to {arguments['owner']}."
    tool = _tool(f"{verb}_{noun}", f"{capitalised(verb)} a {noun}", **parameters)
    result = rng.choice(("ok", '{"status": "ok"}', "done"))
    return Use(tool, text, arguments, result, f"Done: {verb} {noun} {number}.")


USES: tuple[tuple[Callable[[Random], Use], int], ...] = (
    (weather, 8),
    (calculator, 6),
    (read_file, 4),
    (write_file, 3),
    (list_files, 2),
    (clock, 4),
    (convert, 3),
    (send_message, 3),
    (search, 4),
    (unknown, 8),
)


def _use(rng: Random) -> Use:
    makers, weights = zip(*USES, strict=True)
    return rng.choices(makers, weights)[0](rng)


def _name(tool: dict[str, Any]) -> str:
    return tool["function"]["name"]


def _call(number: int, use: Use) -> dict[str, Any]:
    arguments = json.dumps(use.arguments, ensure_ascii=False)
    return {"id": f"call_{number}", "type": "function", "function": {"name": _name(use.tool), "arguments": arguments}}


def _calls(uses: list[Use], first: int) -> list[Message]:
    names = " and ".join(dict.fromkeys(_name(use.tool) for use in uses))
    calls = [_call(first + number, use) for number, use in enumerate(uses)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": use.result}
        for call, use in zip(calls, uses, strict=True)
    ]
    answer = " ".join(use.answer for use in uses)
    return [
        {**say("", f"I need the tool {names} for this."), "tool_calls": calls},
        *results,
        say(answer, "I have the result of the tool and can answer."),
    ]


def tool_use(rng: Random) -> Conversation:
    """One to three turns with the same tools."""
    use = _use(rng)
    offered = {_name(use.tool): use.tool}
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        other = _use(rng).tool
        offered.setdefault(_name(other), other)
    messages: list[Message] = []
    made = 0
    for turn in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if turn == 0 or kind < 0.3:
            # Another question for the first tool has the same schema only if it was made from the same description.
            messages += [user(use.asked), *_calls([use], made)] if turn == 0 else talk(rng)
            made += turn == 0
        elif kind < 0.6 and _name(use.tool) in ("get_weather", "get_time"):
            both = [_again(use, some_city(rng), rng) for _ in range(2)]
            places = " and ".join(other.arguments["city"] for other in both)
            messages += [user(f"And in {places}?"), *_calls(both, made)]
            made += 2
        else:
            messages += small_talk(rng)
    if rng.random() < 0.15:
        messages = talk(rng) + messages
    tools = list(offered.values())
    rng.shuffle(tools)
    return Conversation(messages, tools=tools)


def _again(use: Use, city: str, rng: Random) -> Use:
    """The same tool asked about another city."""
    if _name(use.tool) == "get_time":
        time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        return Use(use.tool, "", {"city": city}, time, f"It is {time} in {city}.")
    degrees, sky = rng.randrange(-9, 36), rng.choice(WEATHER)
    return Use(use.tool, "", {"city": city}, f"{sky}, {degrees} degrees", f"In {city} it is {degrees} degrees: {sky}.")

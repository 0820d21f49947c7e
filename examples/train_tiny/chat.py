"""Generated conversations: small talk, facts, sums, recall, code, JSON answers; those with tools are in ``chat_tools``.

A generator takes random numbers and returns one conversation in OpenAI messages. Every assistant message has its
reasoning; a conversation without thinking leaves it out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chat_words import (
    ADJECTIVES,
    CAPITALS,
    CITIES,
    GLOSSARY,
    NAMES,
    NOUNS,
    SMALL_TALK,
    SNIPPETS,
    SYLLABLES,
    TOPICS,
)

Message = dict[str, Any]
Random = random.Random


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    thinking: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_format: dict[str, Any] | None = None


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def say(text: str, reasoning: str) -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def made_up(rng: Random) -> str:
    """A name nobody has seen: what is said about it must be copied."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def some_name(rng: Random) -> str:
    return made_up(rng) if rng.random() < 0.3 else rng.choice(NAMES)


def some_city(rng: Random) -> str:
    return made_up(rng) if rng.random() < 0.25 else rng.choice(CITIES)


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


# ---- talk and facts --------------------------------------------------------------------------------------------------


def small_talk(rng: Random) -> list[Message]:
    asked, answers = rng.choice(SMALL_TALK)
    return [user(rng.choice(asked)), say(rng.choice(answers), "This is small talk. I answer politely and briefly.")]


def glossary(rng: Random) -> list[Message]:
    term, (meaning, question, answer) = rng.choice(list(GLOSSARY.items()))
    asked = rng.choice(
        (
            "What is {}?",
            "What is {}?",
            "Explain {}.",
            "What does {} mean?",
            "Can you explain {}?",
            "Tell me about {}.",
            "Please explain {} to me.",
            "I keep reading about {}. What is it?",
            "In one or two sentences, what is {}?",
            "Could you tell me what {} is?",
        )
    ).format(term)
    messages = [user(asked), say(meaning, f"The user asks about {term}. I explain what it is in one or two sentences.")]
    if rng.random() < 0.6:
        follow = rng.choice(("And {}?", "And {}?", "{}?", "Ok. {}?", "I see. And {}?")).format(question)
        messages += [user(capitalised(follow)), say(answer, f"The user asks {question}. This is about {term}.")]
    return messages


def question_alone(rng: Random) -> list[Message]:
    """The second question first. One that names its subject needs no introduction."""
    term, (_, question, answer) = rng.choice(list(GLOSSARY.items()))
    asked = f"This is about {term}: {question}?"
    if term.split()[-1] in question and rng.random() < 0.7:
        asked = capitalised(rng.choice(("{}?", "And {}?", "Tell me, {}?")).format(question))
    return [
        user(asked),
        say(answer, f"The user asks {question}. This is about {term}."),
    ]


def capital(rng: Random) -> list[Message]:
    messages: list[Message] = []
    for turn in range(rng.choice((1, 1, 2))):
        country, city = rng.choice(list(CAPITALS.items()))
        asked = ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.")
        text = f"And of {country}?" if turn else rng.choice(asked).format(country)
        messages += [
            user(text),
            say(f"The capital of {country} is {city}.", f"The user asks for the capital of {country}. It is {city}."),
        ]
    return messages


def story(rng: Random) -> list[Message]:
    hero, thing, city, topic = some_name(rng), rng.choice(NOUNS), some_city(rng), rng.choice(TOPICS)
    asked = rng.choice(("Tell me a short story about {} and a {}.", "Write a short story. It is about {} and a {}."))
    text = (
        f"{hero} lived in {city} and had a {rng.choice(ADJECTIVES)} {thing}. One day the {thing} was gone. {hero} "
        f"looked for it "
        f"everywhere, met a stranger who knew all about {topic}, and together they found the {thing} by the river. "
        f"From then on {hero} took good care of it."
    )
    return [
        user(asked.format(hero, thing)),
        say(text, f"The user wants a short story about {hero} and a {thing}. I tell it in a few sentences."),
    ]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def addition_steps(a: int, b: int) -> str:
    """Column by column, as it is taught."""
    steps, carry, place = [], 0, 0
    width = max(len(str(a)), len(str(b)))
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        terms = f"{x} + {y}" + (" + 1" if carry else "")
        carry = total // 10
        more = ", carry 1" if carry and place < width - 1 else ""
        steps.append(f"{terms} = {total}" + (f", write {total % 10}{more}" if more else ""))
    return f"{a} + {b}: " + "; ".join(steps) + f". So {a} + {b} = {a + b}."


def sums(rng: Random) -> list[Message]:
    limit = rng.choice((20, 100, 100, 1000))
    a, b = rng.randrange(1, limit), rng.randrange(1, limit)
    kind = rng.choice("++-*")
    if kind == "+":
        text, steps = f"{a} + {b} = {a + b}", addition_steps(a, b)
    elif kind == "-":
        a, b = max(a, b), min(a, b)
        text, steps = (
            f"{a} - {b} = {a - b}",
            f"{a} - {b}: I need the number that added to {b} makes {a}. It is {a - b}.",
        )
    else:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        text, steps = f"{a} * {b} = {a * b}", f"{a} times {b} is {a * b}."
    asked = rng.choice(("What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?", "{} = ?"))
    return [user(asked.format(text.split(" =")[0])), say(f"{text}.", steps)]


def word_problem(rng: Random) -> list[Message]:
    name, thing, a, b = some_name(rng), rng.choice(NOUNS), rng.randrange(2, 60), rng.randrange(2, 30)
    if rng.random() < 0.5:
        asked = f"{name} has {a} {thing}s and gets {b} more. How many {thing}s does {name} have now?"
        total, steps = a + b, addition_steps(a, b)
    else:
        a += b
        asked = f"{name} has {a} {thing}s and gives away {b}. How many {thing}s are left?"
        total, steps = a - b, f"{a} - {b} = {a - b}."
    ending = "now" if "now" in asked else "left"
    return [user(asked), say(f"{name} has {total} {thing}s {ending}.", f"I start with {a}. {steps}")]


def ordering(rng: Random) -> list[Message]:
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    listed = ", ".join(map(str, numbers))
    kind = rng.choice(("sort", "largest", "smallest"))
    if kind == "sort":
        answer = ", ".join(map(str, sorted(numbers)))
        return [user(f"Sort these numbers: {listed}."), say(answer, f"From the smallest to the largest: {answer}.")]
    best = max(numbers) if kind == "largest" else min(numbers)
    return [
        user(f"Which of these numbers is the {kind}: {listed}?"),
        say(f"The {kind} number is {best}.", f"I compare {listed}. The {kind} is {best}."),
    ]


# ---- words and memory ------------------------------------------------------------------------------------------------


def copying(rng: Random) -> list[Message]:
    words = [
        rng.choice((rng.choice(NOUNS), rng.choice(ADJECTIVES), made_up(rng).lower())) for _ in range(rng.randint(2, 6))
    ]
    text = " ".join(words)
    kind = rng.choice(("repeat", "upper", "backwards", "spell", "count"))
    if kind == "repeat":
        return [user(f"Repeat after me: {text}"), say(text, "I repeat the words.")]
    if kind == "upper":
        return [
            user(f"Write in capital letters: {text}"),
            say(text.upper(), "I write the same words in capital letters."),
        ]
    if kind == "backwards":
        return [
            user(f"Write these words in reverse order: {text}"),
            say(" ".join(words[::-1]), "The last word comes first."),
        ]
    if kind == "spell":
        return [user(f"Spell the word {words[0]}."), say(" ".join(words[0]), "I write the letters one by one.")]
    return [
        user(f"How many words are in: {text}"),
        say(f"There are {len(words)} words.", f"I count: {', '.join(words)}. That makes {len(words)}."),
    ]


FILLERS: tuple[Callable[[Random], list[Message]], ...] = (small_talk, glossary, capital, sums, copying, ordering)


def recall(rng: Random) -> list[Message]:
    """Something said at the start is asked for at the end, sometimes far beyond the window."""
    name, city, thing, number = some_name(rng), some_city(rng), rng.choice(NOUNS), rng.randrange(100, 10000)
    facts = [
        (f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}.", "name"),
        (f"I live in {city}.", f"{city} is a nice place.", "Where do I live?", f"You live in {city}.", "city"),
        (f"Please remember the number {number}.", f"I will remember {number}.", "Which number should you remember?",
         f"The number is {number}.", "number"),
        (f"My favourite thing is my {thing}.", f"A {thing} is a good thing to have.", "What is my favourite thing?",
         f"Your favourite thing is your {thing}.", "favourite thing"),
    ]  # fmt: skip
    told, heard, asked, answer, what = rng.choice(facts)
    messages = [user(told), say(heard, f"The user tells me their {what}. I should remember it.")]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5))):
        messages += rng.choice(FILLERS)(rng)
    return [*messages, user(asked), say(answer, f"The user told me their {what} before. {answer}")]


def code(rng: Random) -> list[Message]:
    task, body = rng.choice(SNIPPETS)
    asked = rng.choice(
        ("Write a Python function that {}.", "Give me a function that {}.", "How do I write a function that {}?")
    )
    text = asked.format(task)
    if rng.random() < 0.5:
        old = body.split("def ")[1].split("(")[0]
        new = f"{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}"
        body, text = body.replace(f"def {old}(", f"def {new}("), f"{text} Call it {new}."
    return [user(text), say(f"```python\n{body}\n```", f"The user wants a function that {task}. It is short.")]


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _schema(values: dict[str, Any]) -> dict[str, Any]:
    def kind(value: Any) -> dict[str, Any]:
        if isinstance(value, list):
            return {"type": "array", "items": kind(value[0])}
        names = {bool: "boolean", int: "integer", float: "number", str: "string"}
        return {"type": names[type(value)]}

    return {
        "type": "object",
        "properties": {key: kind(value) for key, value in values.items()},
        "required": list(values),
    }


def _facts(rng: Random) -> tuple[str, dict[str, Any]]:
    """A sentence, and what it says as an object."""
    name, city, thing = some_name(rng), some_city(rng), rng.choice(NOUNS)
    age, count, price = rng.randrange(5, 95), rng.randrange(1, 50), rng.randrange(1, 400) / 4
    kind = rng.randrange(6)
    if kind == 0:
        return f"{name} is {age} years old and lives in {city}.", {"name": name, "age": age, "city": city}
    if kind == 1:
        return f"{name} ordered {count} {thing}s for {price} euros.", {
            "customer": name,
            "item": thing,
            "quantity": count,
            "price": price,
        }
    if kind == 2:
        day, hour = rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")), rng.randrange(8, 19)
        return f"The {thing} meeting in {city} is on {day} at {hour}.", {
            "title": f"{thing} meeting",
            "place": city,
            "day": day,
            "hour": hour,
        }
    if kind == 3:
        others = [some_name(rng) for _ in range(rng.randint(2, 4))]
        return f"Present were {', '.join(others[:-1])} and {others[-1]}.", {"names": others, "count": len(others)}
    if kind == 4:
        good = rng.random() < 0.5
        feeling = rng.choice(("great", "wonderful", "very good") if good else ("terrible", "awful", "very bad"))
        return f"The {thing} from {city} is {feeling}.", {
            "subject": thing,
            "sentiment": "positive" if good else "negative",
        }
    keys = rng.sample(NOUNS, rng.randint(2, 4))
    values: dict[str, Any] = {}
    for key in keys:
        values[key] = rng.choice((rng.choice(ADJECTIVES), rng.randrange(1000), rng.random() < 0.5, made_up(rng)))
    said = [f"{key} is {str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    return f"{capitalised(', '.join(said))}.", values


def json_answer(rng: Random) -> Conversation:
    sentence, values = _facts(rng)
    if rng.random() < 0.2:
        a, b = rng.randrange(1, 100), rng.randrange(1, 100)
        sentence, values = f"What is {a} + {b}?", {"expression": f"{a} + {b}", "result": a + b}
    keys = list(values)
    style = rng.randrange(3)
    answer = json.dumps(values, ensure_ascii=False)
    reasoning = f"The answer must be JSON with the keys {', '.join(keys)}."
    if style == 0:
        schema = {"name": "answer", "schema": _schema(values)}
        asked = rng.choice(("{}", "{} Answer in JSON.", "Extract the data: {}", "Turn this into JSON: {}"))
        form: dict[str, Any] | None = {"type": "json_schema", "json_schema": schema}
    else:
        listed = ", ".join(keys[:-1]) + f" and {keys[-1]}"
        asked = rng.choice((f"{{}} Answer in JSON with the keys {listed}.", f"Give me JSON with {listed}: {{}}"))
        form = {"type": "json_object"} if style == 1 else None
    return Conversation([user(asked.format(sentence)), say(answer, reasoning)], response_format=form)


# ---- the mix ---------------------------------------------------------------------------------------------------------

TALK: tuple[tuple[Callable[[Random], list[Message]], int], ...] = (
    (small_talk, 6),
    (glossary, 16),
    (question_alone, 5),
    (capital, 6),
    (story, 4),
    (sums, 12),
    (word_problem, 6),
    (ordering, 5),
    (copying, 8),
    (recall, 12),
    (code, 8),
)


def talk(rng: Random) -> list[Message]:
    generators, weights = zip(*TALK, strict=True)
    return rng.choices(generators, weights)[0](rng)

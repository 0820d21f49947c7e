"""A small byte-level BPE tokenizer with DeepSeek's special tokens, trained on the text below: the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
PLACEHOLDER = "<｜place▁holder▁no▁{}｜>"
NOISE = PLACEHOLDER.format(0)  # what a draft row holds before its token is known

# Text inside a turn: they survive skip_special_tokens, because parsers look for them in the decoded text.
MARKUP = ("<think>", "</think>", "｜DSML｜")
CONTROL = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    IMAGE,
    *(f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/")),
    *(f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")),
)
SMALLEST = 3 + 256 + len(MARKUP) + len(CONTROL) + 1


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Exactly ``vocab_size`` ids: 0 bos, 1 eos, 2 pad, then bytes and merges, placeholders as filling, special tokens.

    Raises:
        ValueError: fewer ids than bytes and special tokens need.
    """
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab={vocab_size} is too small; legal: {SMALLEST} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP) - len(CONTROL) - 1,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    filling = vocab_size - tokenizer.get_vocab_size() - len(MARKUP) - len(CONTROL)
    tokenizer.add_special_tokens([PLACEHOLDER.format(i) for i in range(filling)])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of every token that is not plain text, markup included."""
    return sorted(tokenizer.get_added_tokens_decoder())


def write_tokenizer(tokenizer: Tokenizer, path: Path, max_position: int) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers and SGLang read them. No bos is added to plain text."""
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (path / "tokenizer_config.json").write_text(text, encoding="utf-8")


CORPUS = """
The river runs past the old mill and under the stone bridge. In the morning the water is grey, in the evening it is
gold. People from the town walk along the bank, talk about the weather, buy bread, and come home before the rain.
Every house has a garden, every garden has a tree, and in each of the trees there is at least one bird that sings when
the sun comes up.

What is the capital of France? The capital of France is Paris. What is the weather in Paris today? It is sunny and
warm, with a light wind from the south; tomorrow there will be clouds, and the day after tomorrow some rain. How many
people live there? About two million people live in the city, and more than ten million in the region around it. Could
you tell me more? Of course.

A large language model reads a sequence of tokens and predicts the next token. It was trained on a large amount of
text. The first step is to split the text into tokens; the second step is to look up a vector for every token; then
each layer mixes the vectors and transforms them; the last layer gives a score for every token of the vocabulary. To
write an answer, the model takes one token after another until it reaches the end of the sequence. Attention compares
a query with the keys and sums the values. Experts are small networks; a router sends each token to a few of them.
Memory holds what was computed before, so that nothing is computed twice.

Let me think step by step. First, we need to find the number of apples. There are 12 apples in the first basket and 30
in the second basket, so there are 12 + 30 = 42 apples in total. If we give away 7 of them, then 42 - 7 = 35 are left.
Half of 36 is 18, and a quarter of 100 is 25. Therefore, the answer is 35. Wait, let me check this again: 35 + 7 = 42,
which is correct. So the final answer is 35. However, if the question is about both baskets together, we should not
count the same apple twice. I think that is right.

The user asks for a short story, so I should write a short story. Once upon a time there was a small robot who lived
in a library. It could read every book, but it could not remember what it had read the day before. One night a child
left a note on the table: please write down one thing that you learned today. From then on the robot wrote one line
every evening, and after some years the lines had become a book of their own. The children of the town read it and
asked for more. And the robot, who had forgotten all of it, was happy to read it too. Thank you for the story! You are
welcome. Is there anything else I can help you with? Yes, please.

Reasoning and answer are different parts of a response. Available tools have a name, a description and parameters. You
can use a tool when you need information that you do not have. You must follow the schema. Otherwise, output the
answer directly. The following functions are available: get_weather, search, read_file, write_file, run_command,
calculate. The result of a tool call is text. Parameters: string, number, integer, boolean, array, object; required,
optional, default, true, false, null, type, properties.

{"name": "get_weather", "description": "Get the current weather", "parameters": {"type": "object", "properties":
{"city": {"type": "string", "description": "The name of the city"}, "unit": {"type": "string", "enum": ["celsius",
"fahrenheit"]}}, "required": ["city"]}}
{"id": 1, "name": "Alice", "email": "alice@example.com", "tags": ["a", "b", "c"], "active": true, "score": 0.5}
{"id": 2, "name": "Bob", "email": "bob@example.com", "tags": [], "active": false, "score": null}
[{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello, world!"},
{"role": "assistant", "content": "Hello! How can I help you today?"}, {"role": "tool", "content": "22 degrees"}]

import json
import math
from pathlib import Path

class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x = x
        self.y = y

    def distance(self, other: "Point") -> float:
        return math.sqrt((self.x - other.x) ** 2 + (self.y - other.y) ** 2)

def fibonacci(n: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]

def main() -> None:
    for index, value in enumerate(fibonacci(10)):
        if value % 2 == 0:
            print(f"{index}: {value}")
    try:
        data = json.loads(Path("config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError("the file is missing") from error
    else:
        print(data.get("name", "none"), file=None)

if __name__ == "__main__":
    main()

# Title

* one item
* another item
* the last item

| name | value | note |
| --- | --- | --- |
| first | 1 | small |
| second | 2 | large |

```python
x = [i * i for i in range(10) if i > 3 and i != 5]
assert sum(x) == 251, "wrong"
```

<div class="page"><p>Some <b>bold</b> text and a <a href="https://example.com/index.html">link</a>.</p></div>
SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name ORDER BY name LIMIT 10;
$ git commit -m "fix the test" && make test 2>&1 | tail -n 20
The ratio of 3 to 4 is 0.75, or 75%. On 2024-05-17 at 10:30 the price was $1,299.99 (about 1,200 euros).

Le chat dort sur la chaise près de la fenêtre. Où est la bibliothèque ? Der Fluss fließt langsam durch die Stadt, und
über die Brücke gehen viele Leute. El niño come una manzana en el jardín. La città è bella, perché no? Ça va très
bien, merci.
今天天气很好，我们去公园散步吧。你好，世界！请问现在几点了？人工智能是计算机科学的一个分支。
我不知道这个问题的答案，但是我们可以一起想一想。这是一个很小的模型，它只会说一些没有意义的话。
谢谢你的帮助。不客气，欢迎再来。一二三四五六七八九十。
こんにちは、元気ですか。今日はとても暑いです。
Привет, как дела? Всё хорошо, спасибо.

a about after all also an and any are as at back be because been before but by can come could day did do down each
even find first for from get give go good great had has have he her here him his how if in into is it its just know
like little long look made make man many may me more most much must my never new no not now number of off old on one
only or other our out over own part people place right said same say see she should show small so some still such take
tell than that the their them then there these they thing think this those time to too two under up us use very want
was way we well went were what when where which while who will with word work would write year you your above across
again always another ask began being best better between both call change children city close country cut different
does earth end enough every example eye face family far father feet few food form found four group grow hand hard head
help high home house idea important keep kind land large last later learn leave left letter life light line live might
mother mountain move name near need next night often open page paper play point question quickly read real river run
school sea second seem sentence set side something sometimes soon sound start state stop story study sure table though
thought three through together took toward tree try turn until walk watch water white without world young
"""

"""Words, facts and answers that the generated conversations are made of. Written for this model; free to use."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.replace("\n", ",").split(",") if name.strip()]


NAMES = _words("""
Alice Bob Carol David Emma Frank Grace Henry Ivy Jack Kate Leo Mary Nina Oscar Paula Quinn Rosa Sam Tom Una Victor
Wendy Xavier Yara Zoe Anna Ben Clara Daniel Elena Felix Gina Hugo Irene Jonas Karla Lukas Maria Noah Olga Peter Rita
Simon Tara Uwe Vera Walter Yusuf Zara Amir Bianca Chen Dora Emil Fatima Goran Hana Igor Julia Kofi Lina Marco Nadia
Omar Priya Rafael Sofia Tariq Uma Vikram Wei Ximena Yuki Zainab
""")
CITIES = _names("""
Paris, London, Berlin, Madrid, Rome, Vienna, Oslo, Lisbon, Dublin, Prague, Warsaw, Athens, Helsinki, Stockholm,
Copenhagen, Brussels, Amsterdam, Zurich, Geneva, Milan, Naples, Venice, Florence, Munich, Hamburg, Cologne, Lyon,
Nice, Marseille, Porto, Seville, Valencia, Barcelona, Krakow, Budapest, Bucharest, Sofia, Belgrade, Zagreb,
Ljubljana, Riga, Tallinn, Vilnius, Reykjavik, Edinburgh, Glasgow, Manchester, Liverpool, Bristol, Cardiff, Belfast,
Cork, Tokyo, Kyoto, Osaka, Seoul, Beijing, Shanghai, Shenzhen, Hangzhou, Hong Kong, Taipei, Singapore, Bangkok,
Hanoi, Jakarta, Manila, Delhi, Mumbai, Chennai, Karachi, Lahore, Dubai, Doha, Tehran, Baghdad, Ankara, Istanbul,
Cairo, Nairobi, Lagos, Accra, Dakar, Tunis, Casablanca, Cape Town, Sydney, Melbourne, Perth, Auckland, Wellington,
Toronto, Montreal, Vancouver, New York, Boston, Chicago, Denver, Seattle, Austin, Miami, Houston, Lima, Bogota,
Quito, Santiago, Buenos Aires, Montevideo, Rio de Janeiro, Brasilia, Mexico City, Havana, Panama City
""")
CAPITALS = dict(
    pair.split(":")
    for pair in _names("""
France:Paris, Germany:Berlin, Spain:Madrid, Italy:Rome, Austria:Vienna, Norway:Oslo, Portugal:Lisbon,
Ireland:Dublin, Czechia:Prague, Poland:Warsaw, Greece:Athens, Finland:Helsinki, Sweden:Stockholm,
Denmark:Copenhagen, Belgium:Brussels, Hungary:Budapest, Romania:Bucharest, Bulgaria:Sofia, Serbia:Belgrade,
Croatia:Zagreb, Slovenia:Ljubljana, Latvia:Riga, Estonia:Tallinn, Lithuania:Vilnius, Iceland:Reykjavik, Japan:Tokyo,
China:Beijing, Thailand:Bangkok, Vietnam:Hanoi, Indonesia:Jakarta, India:New Delhi, Qatar:Doha, Iran:Tehran,
Iraq:Baghdad, Turkey:Ankara, Egypt:Cairo, Kenya:Nairobi, Ghana:Accra, Senegal:Dakar, Tunisia:Tunis, Morocco:Rabat,
Canada:Ottawa, Peru:Lima, Colombia:Bogota, Ecuador:Quito, Chile:Santiago, Argentina:Buenos Aires,
Uruguay:Montevideo, Brazil:Brasilia, Mexico:Mexico City, Cuba:Havana, Australia:Canberra, New Zealand:Wellington,
Netherlands:Amsterdam, Switzerland:Bern
""")
)
NOUNS = _words("""
apple bread chair door egg flower garden house island jacket key lamp mountain note orange paper river stone table
window boat bridge camera desk engine forest guitar hammer ladder mirror needle ocean pencil queue rocket saddle
train umbrella valley wagon box candle drum folder glass horse kettle letter market number office package report
server ticket user order invoice message event project task product account image song movie book recipe city
country student teacher driver doctor lesson meeting session batch token page record sensor
""")
ADJECTIVES = _words("""
big small red green blue old new warm cold fast slow bright dark quiet loud heavy light round flat soft hard clean
dry wet deep high
""")
VERBS = _words(
    "find get open create delete update list count check send start stop move copy fetch show print close track load"
)
WEATHER = _names("sunny, cloudy, rainy, windy, foggy, snowy, clear, stormy, partly cloudy, light rain")
FILES = _words("notes config data readme report todo main test users events log index settings model results")
ENDINGS = _words("txt md json py csv log yaml html")
FOLDERS = _words("docs src tests data home tmp logs backup photos projects reports")
CURRENCIES = _words("EUR USD GBP JPY CHF CNY INR BRL CAD AUD SEK NOK")
TOPICS = _names("""
tides, black holes, bread baking, bees, glaciers, chess openings, solar panels, old maps, violins, coral reefs,
volcanoes, bicycles, tea, clouds, bridges, stars, whales, paper making, compilers, prime numbers, hash tables,
sorting, gardens, trains, radio, rainbows
""")

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly and precisely.",
    "Answer briefly.",
    "You are a friendly assistant.",
    "You are a careful assistant. Think before you answer.",
    "Be concise.",
    "You are a tiny model. Do your best.",
    "You help people with their questions.",
    "You are a helpful assistant. " + "Answer briefly and precisely. " * 12,
)

# term: what it is, and one thing people ask next with its answer
GLOSSARY: dict[str, tuple[str, str, str]] = {
    "speculative decoding": (
        "Speculative decoding lets a small draft guess several tokens ahead, and the large model checks all of them "
        "in one step. Guesses "
        "that agree with the large model are kept, so the text is the same and arrives faster.",
        "why is it lossless",
        "Because the large model checks every guess. A wrong guess is thrown away and replaced by the token of the "
        "large model.",
    ),
    "a draft": (
        "A draft is a short run of guessed tokens. Here a block has five of them.",
        "what happens when a draft is wrong",
        "The tokens before the first wrong guess are kept, the rest is dropped, and the next block starts from there.",
    ),
    "verification": (
        "Verification runs the draft tokens through the full model in one step and compares its choices with the "
        "guesses.",
        "why is it cheap",
        "Because reading the weights costs most of the time, and six rows read them once, just like one row.",
    ),
    "acceptance length": (
        "Acceptance length is the mean number of tokens that one verification step yields: the accepted drafts and "
        "one more.",
        "what is a good value",
        "With five drafts the best value is six. Three or more is good.",
    ),
    "the confidence head": (
        "The confidence head estimates, for each draft token, whether it will be accepted.",
        "what is it used for",
        "The scheduler verifies only drafts that are likely to be accepted when the server is busy.",
    ),
    "the Markov head": (
        "The Markov head is a small bigram model. It tells each draft token what usually follows the token before it.",
        "why is it needed",
        "All rows of a draft block run at once, so a row does not know what the row before it chose. The Markov head "
        "tells it.",
    ),
    "a page": (
        "A page is a fixed piece of memory that holds what the model keeps about 128 tokens.",
        "why does a page hold 128 tokens",
        "A page holds 128 tokens because that is small enough to waste little and large enough to be moved in one "
        "piece.",
    ),
    "the prefix cache": (
        "The prefix cache keeps the pages of earlier requests. A new request with the same beginning reuses them.",
        "when does it help",
        "It helps when many requests start with the same system prompt, and when a conversation goes on.",
    ),
    "the KV cache": (
        "The KV cache holds the keys and values of earlier tokens, so that they are not computed again.",
        "why is it small here",
        "It is small because all heads share one latent, pairs of tokens share a row, and the rows are stored in four "
        "bits.",
    ),
    "the sliding window": (
        "The sliding window is the last 128 tokens. Every layer reads all of them.",
        "what about older tokens",
        "Older tokens are read through compressed groups that the indexer selects.",
    ),
    "the indexer": (
        "The indexer is a small attention that scores every compressed group and keeps the best ones.",
        "why not read all groups",
        "Reading a few selected groups costs the same at any length, and most groups do not matter for a token.",
    ),
    "candidate blocks": (
        "Candidate blocks are runs of eight groups. One layer picks the best blocks, and later layers search only "
        "inside them.",
        "why are they useful",
        "They are useful because later layers then score a few thousand groups instead of a million.",
    ),
    "a compressed latent": (
        "A compressed latent is one small vector that stands for one or two tokens. It is both key and value.",
        "how is it stored",
        "It is stored in four bits a channel, with one scale for every sixteen channels.",
    ),
    "Engram": (
        "Engram is a memory of short phrases. The last tokens are hashed, and the hash picks rows of a large table.",
        "why is it cheap",
        "It is cheap because a lookup reads a few rows, however large the table is.",
    ),
    "an n-gram": (
        "An n-gram is a run of n tokens. Engram looks at runs of two, three and four.",
        "what happens when two n-grams share a row",
        "Then the gate decides whether the row fits the context, and ignores it when it does not.",
    ),
    "a mixture of experts": (
        "A mixture of experts is a layer with many small networks. A router sends each token to a few of them.",
        "why use it",
        "It gives the model many weights while each token uses only a few of them.",
    ),
    "the router": (
        "The router scores the experts for each token and picks the best two.",
        "what is the bias for",
        "The bias is added for the choice only. It keeps the load of the experts even without changing their weights "
        "in the sum.",
    ),
    "the shared expert": (
        "The shared expert is the one that every token uses.",
        "why have one",
        "It learns what all tokens need, so that the other experts can specialise.",
    ),
    "expert load balancing": (
        "Expert load balancing places copies of busy experts on several devices, so that no device has to wait.",
        "when are experts moved",
        "They are moved from time to time, in small pieces, when the counted load has become uneven.",
    ),
    "hyper-connections": (
        "Hyper-connections keep four residual streams instead of one and learn how to mix them before and after each "
        "layer.",
        "why are the mixes doubly stochastic",
        "Rows and columns that add up to one keep the size of the streams the same through many layers.",
    ),
    "quantisation": (
        "Quantisation stores numbers in few bits: a block of small numbers shares one scale.",
        "does it change the answers",
        "A little. A model that was trained with it hardly notices.",
    ),
    "FP8": (
        "FP8 is a number format with eight bits: one sign, four bits of exponent and three of mantissa.",
        "where is it used",
        "It is used for most weights, for the inputs of matrix products and for the sliding window.",
    ),
    "FP4": (
        "FP4 is a number format with four bits. It has eight magnitudes, from zero to six.",
        "where is it used",
        "It is used for the experts, for the compressed latents and for the index keys.",
    ),
    "a scale": (
        "A scale is a factor that a block of numbers shares. Here most scales are powers of two.",
        "why powers of two",
        "Multiplying by a power of two is exact, so nothing is lost twice.",
    ),
    "RMSNorm": (
        "RMSNorm divides a vector by its root mean square and multiplies it by learned weights.",
        "why is it needed",
        "It keeps the inputs of every layer at the same size.",
    ),
    "a rotary embedding": (
        "A rotary embedding turns pairs of channels by an angle that grows with the position, so that a dot product "
        "depends on the distance.",
        "why is the output turned back",
        "Keys are values here. Turning the output back removes the position from the sum.",
    ),
    "an attention sink": (
        "An attention sink is a logit without a value. It takes a share of the softmax when no key matters.",
        "why is it needed",
        "Without it a head would have to read something even when there is nothing to read.",
    ),
    "a tokenizer": (
        "A tokenizer splits text into tokens and joins tokens into text.",
        "how many tokens does this model have",
        "This model has 3072 tokens. The large one has 129280.",
    ),
    "a token": (
        "A token is a piece of text with a number. It can be a word, a part of a word, a digit or a sign.",
        "why not use letters",
        "Text has fewer tokens than letters, so a model that reads tokens has less to do.",
    ),
    "temperature": (
        "Temperature divides the logits before sampling. Zero always takes the most likely token.",
        "what is greedy decoding",
        "Greedy decoding is sampling at temperature zero: the most likely token is taken at every step.",
    ),
    "prefill": (
        "Prefill runs all tokens of a prompt at once. It fills the memory and yields the first token.",
        "what comes after prefill",
        "After prefill comes decode: one step for each new token, or for each verified block.",
    ),
    "decode": (
        "Decode produces the answer step by step. Each step reads all active weights once.",
        "how can it be faster",
        "It can be faster with larger batches, with speculative decoding and with smaller weights.",
    ),
    "replay": (
        "Replay runs the last tokens of a cached prefix again to rebuild the window, without writing the pages.",
        "why is it needed",
        "The window is not kept with the pages, because it is large and cheap to compute again.",
    ),
    "a state slot": (
        "A state slot holds what only a running request needs: the window, the unfinished pair and the last token "
        "classes.",
        "what happens to it at the end",
        "At the end of the request the slot is forgotten and given to another request.",
    ),
    "SGLang": (
        "SGLang is a server for language models. It schedules requests, keeps the prefix cache and speaks HTTP.",
        "what does the plugin add",
        "The plugin adds the model, its kernels and its memory, behind one flag.",
    ),
    "this plugin": (
        "This plugin serves DeepSeek-V4.1-Flash in SGLang, with its own model code, kernels and memory.",
        "how do I start it",
        "Install it beside SGLang and start the server with --model-impl deepinfer.",
    ),
    "a reference op": (
        "A reference op is the plain version of a kernel. It defines what is right, and every fast kernel is compared "
        "with it.",
        "is it fast",
        "No. It computes in double precision, so that results do not depend on the batch.",
    ),
    "a checkpoint": (
        "A checkpoint is a folder with the weights of a model, its config and its tokenizer.",
        "what if a tensor is missing",
        "Then the loader refuses the checkpoint and names the tensor.",
    ),
    "perplexity": (
        "Perplexity says how surprised a model is by a text. Lower is better, and one means no surprise at all.",
        "how is it computed",
        "It is the exponential of the mean negative log probability of the tokens.",
    ),
    "calibration": (
        "Calibration makes confidences true: of all drafts with confidence 0.8, eight in ten should be accepted.",
        "how is it done here",
        "Each draft position has a temperature that is fitted on held-out text.",
    ),
    "a tool call": (
        "A tool call is an answer that asks the program around the model to run a function and to return its result.",
        "who runs the tool",
        "The client runs it and sends the result back in the next message.",
    ),
    "reasoning effort": (
        "Reasoning effort is a number from 1 to 100 that says how long the model should think before it answers.",
        "what is the default",
        "The default is 75.",
    ),
    "a JSON schema": (
        "A JSON schema describes what a JSON text must look like: its keys, their types and which of them are "
        "required.",
        "who enforces it",
        "The server enforces it. Tokens that would break the schema are masked.",
    ),
    "batch invariance": (
        "Batch invariance means that the result of a request does not depend on the other requests in the batch.",
        "why does it matter",
        "It makes runs repeatable, and a wrong result can be found again.",
    ),
    "time to first token": (
        "Time to first token is how long a user waits until the answer begins.",
        "what makes it shorter",
        "A cached prefix, a shorter prompt and a free server make it shorter.",
    ),
}

JOKES = (
    "Why did the token cross the page? To get to the next block.",
    "I told my cache a secret. Now everybody with the same prefix knows it.",
    "An expert walks into a bar. The router sends it home: the load was too high.",
    "Why was the draft so happy? It was accepted.",
    "My memory is four bits a channel, but it has a scale for every occasion.",
)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "Good evening"),
     ("Hello! How can I help you today?", "Hi! What can I do for you?", "Hello! What would you like to know?")),
    (("How are you?", "How are you today?", "How is it going?"),
     ("I am fine, thank you. How can I help you?", "Very well, thank you. What can I do for you?")),
    (("Thank you!", "Thanks", "Thank you very much.", "Thanks a lot!"),
     ("You are welcome!", "You are welcome. Is there anything else?", "Gladly. Ask me anything else.")),
    (("Goodbye", "Bye", "See you later!", "Good night"), ("Goodbye!", "Goodbye! Come back any time.", "See you soon!")),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Are you a large model?", "Which model are you?"),
     ("I am a very small model with the architecture of DeepSeek-V4.1-Flash. I was trained to test a server.",
      "I am a tiny language model. I know a little Python and a few words about inference.")),
    (("What can you do?", "How can you help me?", "What are you good at?"),
     ("I can chat a little, add numbers, call tools, answer in JSON and complete Python code.",
      "I can explain how this server works, call a tool for you and answer in JSON.")),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."), JOKES),
)  # fmt: skip
SNIPPETS: tuple[tuple[str, str], ...] = (
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
    ("returns the larger of two numbers", "def larger(a, b):\n    return a if a > b else b"),
    ("reverses a string", "def reverse(text):\n    return text[::-1]"),
    ("counts the words of a text", "def count_words(text):\n    return len(text.split())"),
    ("checks whether a number is even", "def is_even(n):\n    return n % 2 == 0"),
    ("checks whether a number is prime",
     "def is_prime(n):\n    if n < 2:\n        return False\n"
     "    return all(n % d for d in range(2, int(n ** 0.5) + 1))"),
    ("computes the factorial of a number",
     "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result"),
    ("returns the first n Fibonacci numbers",
     "def fibonacci(n):\n    numbers = [0, 1]\n    while len(numbers) < n:\n"
     "        numbers.append(numbers[-1] + numbers[-2])\n"
     "    return numbers[:n]"),
    ("reads a file", "def read(path):\n    with open(path, encoding=\"utf-8\") as file:\n        return file.read()"),
    ("writes a text to a file",
     "def write(path, text):\n    with open(path, \"w\", encoding=\"utf-8\") as file:\n        file.write(text)"),
    ("loads a JSON file",
     "import json\n\ndef load(path):\n    with open(path, encoding=\"utf-8\") as file:\n"
     "        return json.load(file)"),
    ("removes duplicates from a list", "def unique(items):\n    return list(dict.fromkeys(items))"),
    ("sums the squares of a list", "def sum_of_squares(numbers):\n    return sum(n * n for n in numbers)"),
    ("returns the mean of a list", "def mean(numbers):\n    return sum(numbers) / len(numbers)"),
    ("counts the lines of a file", "def count_lines(path):\n    with open(path) as file:\n"
                                   "        return sum(1 for line in file)"),
    ("converts celsius to fahrenheit", "def fahrenheit(celsius):\n    return celsius * 9 / 5 + 32"),
    ("returns the longest word of a text", "def longest_word(text):\n    return max(text.split(), key=len)"),
    ("flattens a list of lists", "def flatten(lists):\n    return [item for items in lists for item in items]"),
    ("inverts a dictionary", "def invert(mapping):\n    return {value: key for key, value in mapping.items()}"),
)  # fmt: skip
SYLLABLES = _words("ba ko ri ta lu me no si ve za pi gra lon der mi tu wen ka fo xi ran del by os ul ter cy an qua")

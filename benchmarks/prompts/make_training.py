"""Writes the prompts that the heads' training data was made from: python make_training.py 12000 > prompts.txt

Everyday requests, put together from templates and lists. None of them stands in the files beside this one, and none
asks for what the held-out prompts ask for.
"""

from __future__ import annotations

import random
import sys

SCIENCE = """rainbows; earthquakes; volcanoes; tides; gravity; magnetism; static electricity; the moon's phases; black
holes; comets; the seasons; fog; hail; glaciers; erosion; fossils; dinosaurs; evolution; natural selection; DNA;
enzymes; digestion; blood pressure; the heart; the lungs; the immune system; allergies; antibiotics; hormones; the
brain; dreams; hearing; colour vision; echoes; sound waves; lasers; mirrors; lenses; microscopes; telescopes; batteries;
solar panels; wind turbines; nuclear power; electric motors; transformers; steam engines; rockets; satellites;
aeroplanes; submarines; ships floating; bridges; concrete; steel; glass; plastic; paper; soap; rust; fermentation;
yeast; acids and bases; salt; crystals; the periodic table; atoms; molecules; radioactivity; entropy; friction; inertia;
momentum; buoyancy; pressure; coral reefs; whales; migrating birds; ants; spiders; octopuses; mushrooms; moss; cacti;
rainforests; deserts; oceans; rivers; soil; composting; pollination; camouflage; hibernation; the greenhouse effect; the
ozone layer; recycling"""
TECHNOLOGY = """the internet; Wi-Fi; Bluetooth; GPS; touch screens; barcodes; QR codes; email; spam filters; encryption;
passwords; two-factor authentication; cookies on websites; search engines; databases; cloud storage; open source;
operating systems; compilers; version control; unit tests; hash tables; linked lists; stacks and queues; sorting;
caching; neural networks; chatbots; speech recognition; face recognition; self-driving cars; 3D printers; drones;
robots; digital cameras; electric cars; heat pumps; microwaves; washing machines; lifts; thermostats; smoke detectors;
APIs; JSON; regular expressions; virtual machines; containers; load balancers; firewalls; backups; spreadsheets"""
SOCIETY = """democracy; taxes; insurance; mortgages; pensions; supply and demand; unemployment; globalisation; trade
unions; the stock market; bonds; central banks; budgets; advertising; copyright; patents; elections; juries; human
rights; free speech; privacy; public libraries; public transport; city planning; volunteering; school uniforms;
homework; remote work; tourism; fast fashion; organic farming; veganism; zoos; museums; the Olympic Games; chess; jazz;
opera; the waltz; origami; calligraphy; photography; pottery; knitting; gardening; bird watching; hiking; meditation;
yoga"""
HISTORY = """the Silk Road; the Black Death; the Renaissance; the Reformation; the Enlightenment; the Industrial
Revolution; the American Civil War; the First World War; the Cold War; the Space Race; the fall of the Berlin Wall;
ancient Egypt; ancient Greece; the Vikings; the Mongol Empire; the Ottoman Empire; the Aztecs; the Inca; feudal Japan;
the Crusades; the Magna Carta; the discovery of penicillin; the invention of the wheel; the history of money; the
history of clocks; the history of writing; the history of chocolate; the history of tea; the history of maps; the
history of the telephone; the history of railways; the history of cinema; the women's suffrage movement; the civil
rights movement; the Great Depression; the Gold Rush; the Great Fire of London; the building of the pyramids; the Age of
Exploration"""
PEOPLE = """Isaac Newton; Albert Einstein; Ada Lovelace; Alan Turing; Galileo Galilei; Leonardo da Vinci; Charles
Darwin; Florence Nightingale; Nelson Mandela; Mahatma Gandhi; Abraham Lincoln; Cleopatra; Julius Caesar; Napoleon;
Mozart; Beethoven; Frida Kahlo; Vincent van Gogh; William Shakespeare; Jane Austen; Rosa Parks; Amelia Earhart; Nikola
Tesla; Thomas Edison; Louis Pasteur; Aristotle; Socrates; Confucius; Marco Polo; Johannes Gutenberg; Katherine
Johnson"""
FOOD = """tomato soup; a green salad; roast potatoes; fried rice; an omelette; lentil curry; banana bread; chocolate
cake; apple pie; oatmeal biscuits; hummus; guacamole; pizza dough; pasta with mushrooms; risotto; tacos; dumplings;
porridge; lemonade; iced tea; a fruit smoothie; scrambled eggs; chicken stew; baked fish; stuffed peppers; garlic bread;
falafel"""
CREATURES = """a shy dragon; a clumsy wizard; an old sailor; a curious robot; a lonely ghost; a brave mouse; a tired
king; two sisters; a young inventor; a lost dog; a talking tree; a retired spy; a nervous pilot; a baker; a clockmaker;
a boy who can fly; a girl who hears colours; a stubborn goat; a street musician; a doctor in a small village; an
astronaut"""
SCENES = """in a flooded city; on a deserted island; in a snowstorm; at a night market; in an abandoned theatre; on a
space station; in a small bookshop; during a power cut; at a wedding; in a desert; under the sea; in a castle; on a
mountain; in a hospital at night; at a school fair; in a hot-air balloon; in the year 2150; in an old library; at a
railway museum"""
FEELINGS = """hope; courage; autumn; rain; friendship; the night sky; a river; an old house; childhood; time; silence;
spring; a garden; the wind; travelling; a mountain; saying goodbye; a cat at a window; bread; a train station; the
desert"""
PROBLEMS = """I cannot fall asleep; my neighbour is loud; I forget names; I am always late; my houseplants die; my
laptop is slow; I argue with my brother; I get bored at work; I eat too many sweets; I am new in town; I want to read
more; I am nervous before exams; my dog barks at night; I spend too long on my phone; my team misses deadlines; I have
cold hands; I want to learn to swim; my bike squeaks; I want to run five kilometres; I cannot decide what to study; my
flat is damp; I have to give bad news; I want to wake up earlier; my child does not want to eat vegetables; I lost my
motivation"""
SKILLS = """learn the guitar; learn Spanish; start a vegetable garden; write a CV; paint a wall; iron a shirt; plan a
birthday party; organise a bookshelf; prepare for a marathon; choose a laptop; clean an oven; wrap a present; write a
novel; start a podcast; take better photos; train a puppy; fix a leaking tap; sew on a button; read a map; build a bird
house; brew coffee; plan a week of meals; write a speech; take notes; pack a suitcase; negotiate a salary; give
feedback; make a budget"""
CODE = """sorts a list of numbers; counts the vowels in a string; computes the factorial of a number; checks whether a
number is prime; merges two sorted lists; removes duplicates from a list; converts Celsius to Fahrenheit; finds the
second largest number; counts the words in a text file; prints the Fibonacci numbers; sums the digits of a number; finds
the longest word; flattens a nested list; checks whether two words are anagrams; computes the average of a list; reads a
CSV file; generates a random password; validates an email address; finds the common elements of two lists; capitalises
every word; computes compound interest; counts how often each letter occurs; rotates a list; draws a triangle of stars;
parses a date"""
LANGUAGES = "Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; Ruby; TypeScript; PHP"
NAMES = (
    "Anna; Ben; Clara; David; Elif; Farid; Grace; Hugo; Ines; Jonas; Kira; Leo; Mina; Nils; Olga; Paul; Rosa; Sam; Tara"
)
JOBS = """teacher; nurse; carpenter; chef; pilot; gardener; journalist; plumber; dentist; software developer;
firefighter; lawyer; architect; translator; farmer; electrician; photographer; vet; bus driver; scientist; tailor;
waiter; accountant"""
GOODS = """umbrella; desk lamp; coffee machine; rucksack; pair of running shoes; water bottle; notebook; electric
kettle; garden chair; bicycle helmet; board game; winter coat; vacuum cleaner; office chair; tent; keyboard; wristwatch;
rain jacket"""
SENTENCES = """The meeting was long and nothing was decided; Send me the files now; He don't know where they was going;
I am writing to complain about the noise; The cat sat on the mat because it was warm; We regret that the concert is
cancelled; You must pay before Friday; The film was not bad but too long; Our shop will be closed on Monday; She said
that she is tired; It is important that everybody come on time; The results was better than we expected"""
AUDIENCE = "a child; a beginner; a ten-year-old; my grandmother; a student; someone in a hurry; a tourist; a colleague"
LENGTHS = """in one paragraph; in three sentences; in simple words; with an example; step by step; in a few
bullet points; briefly"""

TEMPLATES = """What is {topic}?; What are {topic}?; How does {topic} work?; How do {topic} work?
Explain {topic} {length}.
Explain {topic} to {audience}.; Why is {topic} important?; Tell me something surprising about {topic}.
What are the advantages and disadvantages of {topic}?; Write a short introduction to {topic}.
Summarise {topic} {length}.
Give me five facts about {topic}.; What do most people get wrong about {topic}?; Compare {topic} and {topic2}.
What is the difference between {topic} and {topic2}?; How has {topic} changed over time?; Write a quiz about {topic}.
What would the world be like without {topic}?; Who invented {tech}, and why?; How is {tech} used in daily life?
What happened during {history}?; Describe {history} {length}.; Why does {history} still matter today?
What caused {history}?; Who was {person}?; What is {person} known for?; Write a short biography of {person}.
What could we learn from {person} today?; How do I make {food}?; Give me a recipe for {food}.
What goes well with {food}?
Write a shopping list for {food}.; Write a story about {creature} {scene}.
Write the first paragraph of a novel about {creature}.
Write a dialogue between {creature} and {creature2}.; Invent a name and a character for {creature}.
Describe a morning {scene}.; Write a poem about {feeling}.; Write four lines of verse about {feeling}.
Write a song about {feeling}.; What does {feeling} mean to people?; Give me three metaphors for {feeling}.
{problem}. What can I do?; {problem}. Give me three tips.; Write a message to a friend: {problem_low}.
How do I {skill}?; Make a plan: I want to {skill}.; What mistakes should I avoid when I {skill}?
List the tools I need to {skill}.; Write a {language} function that {code}.
Write a {language} program that {code}, and explain it.
How would you test a function that {code}?; Explain line by line a {language} function that {code}.
{name} has {a} apples and buys {b} more. Then {name} gives {c} to {name2}. How many are left?
A {good} costs {a} euros. It is reduced by {pct} percent. What is the new price?
If {name} reads {a} pages a day, how long does a book of {big} pages take?; What is {a} times {b}?
What is {big} divided by {c}?
A room is {a} metres long and {c} metres wide. What is its area?; Is {big} an even number? Explain.
{name} is {a} years old, and {name2} is {c} years younger. How old is {name2}?
Write an advertisement for a {good}.; Write a complaint about a broken {good}.; Write a friendly review of a {good}.
What should I look for when I buy a {good}?; Describe the working day of a {job}.; What does a {job} need to know?
You are a {job}. Introduce yourself.; You are a {job}. Answer a child's question about your work.
Write a job advertisement for a {job}.; Write an invitation from {name} to {name2} for a dinner on Saturday.
Write an email to {name} to move our meeting to next week.; Write a birthday card for {name}, who is a {job}.
Correct the grammar: {sentence}.; Rewrite this politely: {sentence}.; Say it in other words: {sentence}.
Make this shorter: {sentence}.; Translate into French: {sentence}.
Is the tone of this sentence friendly? {sentence}.
List the people in this sentence: {name} met {name2} and a {job} near the station.
Sort these words by alphabet: {name}, {name2}, {food}, {feeling}.; Give me ten words that go with {feeling}.
Write a table with three examples of {topic}.; Ask me five questions about {topic}.; Debate: is {topic} good for us?"""


def _list(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.replace("\n", " ").split(";")]


def _fill(template: str, rng: random.Random) -> str:
    topics = rng.choice([SCIENCE, SCIENCE, TECHNOLOGY, SOCIETY])
    problem = rng.choice(_list(PROBLEMS))
    values = {
        "topic": rng.choice(_list(topics)),
        "topic2": rng.choice(_list(topics)),
        "tech": rng.choice(_list(TECHNOLOGY)),
        "history": rng.choice(_list(HISTORY)),
        "person": rng.choice(_list(PEOPLE)),
        "food": rng.choice(_list(FOOD)),
        "creature": rng.choice(_list(CREATURES)),
        "creature2": rng.choice(_list(CREATURES)),
        "scene": rng.choice(_list(SCENES)),
        "feeling": rng.choice(_list(FEELINGS)),
        "problem": problem[0].upper() + problem[1:],
        "problem_low": problem,
        "skill": rng.choice(_list(SKILLS)),
        "language": rng.choice(_list(LANGUAGES)),
        "code": rng.choice(_list(CODE)),
        "name": rng.choice(_list(NAMES)),
        "name2": rng.choice(_list(NAMES)),
        "good": rng.choice(_list(GOODS)),
        "job": rng.choice(_list(JOBS)),
        "sentence": rng.choice(_list(SENTENCES)),
        "audience": rng.choice(_list(AUDIENCE)),
        "length": rng.choice(_list(LENGTHS)),
        "a": rng.randint(12, 60),
        "b": rng.randint(3, 40),
        "c": rng.randint(2, 11),
        "pct": 5 * rng.randint(1, 12),
        "big": rng.randint(100, 900),
    }
    return template.format_map(values)


def main() -> None:
    count = int(sys.argv[1])
    rng = random.Random(0)
    templates = [line for text in TEMPLATES.splitlines() for line in _list(text)]
    prompts: dict[str, None] = {}  # in order, each once
    while len(prompts) < count:
        prompts[_fill(rng.choice(templates), rng)] = None
    print("\n".join(prompts))


if __name__ == "__main__":
    main()

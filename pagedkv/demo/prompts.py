"""What the demo continues if it is given no prompt."""

_COMMON = """\
Notes on the island of Lindholm. The ferry leaves the north quay at seven every morning and takes forty minutes \
to cross the sound. It carries mail, timber and apples, and returns before dusk. The island has one school, \
two bakeries and a lighthouse, which was built of red granite in 1874. About nine hundred people live there, \
most of them in the village by the harbour. In winter the sound freezes, and the mail comes by sledge. \
The keeper of the lighthouse is called Ingrid Dahl; she also looks after the weather station and the library.

Question: """

_QUESTIONS = (
    "When does the ferry leave?",
    "How long does the crossing take?",
    "What does the ferry carry?",
    "How many bakeries does the island have?",
    "When was the lighthouse built?",
    "How many people live on the island?",
    "How does the mail come in winter?",
    "Who is the keeper of the lighthouse?",
)

PROMPTS = tuple(f"{_COMMON}{question}\nAnswer:" for question in _QUESTIONS)

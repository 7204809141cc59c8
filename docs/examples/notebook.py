"""The fleet from Python: HAULIER_BROKER and HAULIER_KEYS say where it is, as for the command line.

python notebook.py MODEL
"""

import sys

from broker.api import chat, connect, text

model = sys.argv[1]
questions = {"france": "What is the capital of France?", "peru": "What is the capital of Peru?"}

# cell 1: three lines, and the answers come as they are finished
fleet = connect()
job = fleet.submit([chat(name, question, model, max_tokens=32) for name, question in questions.items()], "capitals")
answers = {line["custom_id"]: text(line) for line in job.output()}

# cell 2: what became of it
for name, question in questions.items():
    print(f"{question} {answers[name]}")
print(job.wait().status, job.info().completed, "of", job.info().total)
print(job.explain("peru")[0])
fleet.close()

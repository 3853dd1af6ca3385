# Read by mypy, never run (test_verbs.py): what a type checker makes of the verbs.
import espalier

done = espalier.train(model="m", rollouts=["a.jsonl", "b.jsonl"], out="o", lr=1e-6, betas=(0.9, 0.95), schedule="phased", beta=0.1, quiet=True)
rows: int = done["steps"][0]["rows"]["physical"]
found = espalier.inspect("a.jsonl", "b.jsonl")
espalier.train(model="m", rollouts=[{"prompt_ids": [1], "response_ids": [2], "reward": 1.0}], out="o")
espalier.generate(model="m", prompts=[{"prompt": "Hi"}], reward=lambda **_: 1.0, out="o")
try:
    espalier.score(model="m", rollouts="a.jsonl", out="o", as_="old_logprobs")
except espalier.Error as error:
    code: int = error.exit_code
    print(error.where, error.expected, error.got, error.remedy)
espalier.train(model="m", learning_rate=1e-6)  # wrong: no such option
espalier.train(model="m", schedule="fast")  # wrong: no such word
espalier.plan(model="m", lr=1e-6)  # wrong: of another verb
espalier.train("m")  # wrong: options have names

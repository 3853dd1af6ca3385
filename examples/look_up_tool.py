"""A tool for an agent: the agent looks up a word in its document, asks the tool for it, and answers with the tool's reply.

    build/espalier grpo --task retrieval --env examples/look_up_tool.py --turns 2 --out RUN ...     (docs/agents.md)

The prompt is a document of facts and a question: "otter teal ; yak plum ; ... ? otter". In the first turn the agent answers "teal" from the
document; this is its question to the tool. The tool replies with a newer fact and the question: "; otter gold ; ? otter". In the second turn
the right answer is "gold". A model that reads only the document answers "teal" again.
"""

import hashlib

COLOURS = "black blue brown cyan gold green grey lime".split()


class Environment:
    def reset(self, prompt, ground_truth):
        self.key, self.old = prompt.split()[-1], ground_truth
        others = [colour for colour in COLOURS if colour != ground_truth]
        self.new = others[hashlib.sha256(prompt.encode()).digest()[0] % len(others)]
        self.has_asked = False

    def step(self, text):
        """-> observation, reward, done"""
        if self.has_asked:
            return None, 0.9 if text == self.new else 0.0, True
        self.has_asked = True
        if text != self.old:
            return None, 0.0, True  # the tool knows nothing of it
        return f"; {self.key} {self.new} ; ? {self.key}", 0.1, False

"""The rows of a plan, whatever the model's library: rollouts and their plan, attention and log-probs of rows below open trunks, waves, and the
verdict of a verification. Needs torch alone; espalier.hf and espalier.megatron are made of it."""

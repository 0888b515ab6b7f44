"""The pure part: what is sent to whom, decided without SGLang and without torch.

Order of reading:  geometry -> topology -> routes -> plan;  facts and wire carry
the same values between processes.
"""

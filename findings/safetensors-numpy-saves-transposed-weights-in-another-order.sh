#!/usr/bin/env bash
# safetensors 0.8.0 and 0.7.0
#
# Behaviour: safetensors.numpy writes a transposed array, or a range of its columns, in the order of
# its memory, but with its own shape, so the file has other values. There is no error. Release 0.7.0
# writes the right values. Both docstrings ask for contiguous arrays; only safetensors.torch checks.
# Guess: an array that cannot be written as it is raises, as a tensor does in safetensors.torch.
# Seen: 0.7.0: transposed True, columns True; 0.8.0: transposed False, columns False.
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
for venv in old new; do "${PYTHON:-python3}" -m venv "$work/$venv"; done
"$work/old/bin/pip" install -q safetensors==0.7.0 numpy==2.3.4 || exit 77
"$work/new/bin/pip" install -q safetensors==0.8.0 numpy==2.3.4 || exit 77
cat >"$work/head.py" <<'END'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

kernel = np.arange(24, dtype=np.float32).reshape(4, 6)  # of k_proj: inputs x (3 KV heads of 2)
weights = {"transposed": kernel.T, "columns": kernel[:, 2:4]}  # as torch's; of one KV head
save_file(weights, sys.argv[1])
saved = load_file(sys.argv[1])
right = ", ".join(f"{name} {np.array_equal(saved[name], weights[name])}" for name in weights)
print(f"{safetensors.__version__}: {right}")
END
for venv in old new; do
    "$work/$venv/bin/python" "$work/head.py" "$work/head.safetensors"
done | tee "$work/seen"
diff "$work/seen" - <<'END' >&2 || { echo "changed: safetensors writes these arrays otherwise" >&2 && exit 1; }
0.7.0: transposed True, columns True
0.8.0: transposed False, columns False
END

The backend `llama-cpp` is in the box (install the extra `llama` on workers). Any other program that speaks LocalAI's `backend.proto` can be installed as a directory with `run.sh`.

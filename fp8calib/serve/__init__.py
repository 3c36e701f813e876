"""An OpenAI-compatible server over AsyncLLM; needs the extra `fp8calib[serve]`."""

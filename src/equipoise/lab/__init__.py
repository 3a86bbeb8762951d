"""What uses the library and is no part of it: experiments, benchmarks, the self-check and the showcase."""

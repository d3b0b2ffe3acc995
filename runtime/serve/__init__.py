"""`medusa-serve`: an HTTP server with the interface of OpenAI's; needs the extra `serve`."""

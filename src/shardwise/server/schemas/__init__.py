"""Request bodies as pydantic models: they validate, and they are the OpenAPI description."""

"""openai-agents with its defaults: over the Responses API."""

import openai_agents
from agents import OpenAIResponsesModel

if __name__ == "__main__":
    openai_agents.Model = OpenAIResponsesModel
    openai_agents.main()

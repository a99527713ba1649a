"""openai-agents over the Responses API, which is its default."""

import openai_agents
from agents import OpenAIResponsesModel

if __name__ == "__main__":
    openai_agents.Model = OpenAIResponsesModel
    openai_agents.main()

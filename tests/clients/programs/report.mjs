// What every program of a client needs: the server's address, questions the tiny model can answer, one report.

export const { BASE_URL, MODEL, API_KEY } = process.env; // BASE_URL is without /v1

export const SUM = "What is 17 + 26? Reply with just the number.";
export const NAME = "My name is Alice.";
export const ASK_NAME = "What is my name?";
export const WEATHER = "What is the weather in Oslo?";
export const WEATHER_RESULT = '{"temperature": 7, "sky": "cloudy"}'; // spaced as the model was trained
export const WEATHER_TOLD = "7 degrees and cloudy in Oslo";
export const WEATHER_ABOUT = "Get the current weather in a city.";
export const WEATHER_SCHEMA = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

// Runs the function at once; it returns what it saw, which must have `expected` in it.
export async function feature(api, name, expected, run) {
  let ok = false;
  let detail;
  try {
    detail = String(await run());
    ok = detail !== "" && detail.includes(expected);
  } catch (error) {
    detail = `${error.name}: ${error.message}`;
  }
  detail = detail.replace(/\s+/g, " ").slice(0, 300);
  console.log(JSON.stringify({ api, feature: name, ok, detail }));
}

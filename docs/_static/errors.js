// On the page of error messages: a field that finds the rows of a pasted message.

/** How well a documented message, with ... for what varies, fits the text that a user pasted. 0: not at all. */
function fit(pattern, text) {
  const parts = pattern.toLowerCase().split("...").map((part) => part.trim());
  const escaped = parts.map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const letters = parts.join("").length;
  if (new RegExp(escaped.join(".*")).test(text)) return 1000 + letters;
  if (pattern.toLowerCase().includes(text)) return 500 - letters;
  const words = parts.join(" ").match(/[a-z_]{4,}/g) || [];
  const shared = words.filter((word) => text.includes(word)).length;
  return shared >= 3 && shared >= 0.75 * words.length ? shared : 0;
}

/** The table rows that fit a text, best first, at most three. */
function find(rows, text) {
  text = text.toLowerCase().replaceAll("`", "").replace(/\s+/g, " ").trim();
  if (text.length < 4) return [];
  const scored = rows.map((row) => {
    const messages = [...row.cells[0].querySelectorAll("code")].map((code) => code.textContent);
    return [Math.max(0, ...messages.map((message) => fit(message, text))), row];
  });
  const best = Math.max(...scored.map(([score]) => score));
  const least = best > 1000 ? 1000 + (best - 1000) / 2 : 1; // a match of few letters is chance beside one of many
  return scored.filter(([score]) => score >= least).sort(([one], [other]) => other - one).slice(0, 3).map(([, row]) => row);
}

function addField() {
  const title = document.querySelector("h1");
  if (!title?.textContent.startsWith("Error messages")) return;
  const rows = [...document.querySelectorAll("tbody tr")];
  const field = document.createElement("input");
  field.type = "search";
  field.className = "find-error";
  field.placeholder = "Paste the message";
  field.setAttribute("aria-label", "Find an error message");
  const found = document.createElement("table");
  const note = document.createElement("p");
  field.addEventListener("input", () => {
    const best = find(rows, field.value);
    found.replaceChildren(...best.map((row) => row.cloneNode(true)));
    note.textContent = field.value.trim().length < 4 || best.length ? "" : "Not found. Try some words of the reason.";
  });
  title.after(field, found, note);
}

document.addEventListener("DOMContentLoaded", addField);

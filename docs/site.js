// Unfolds what a search has found: a result's address has the words that were looked for as `h`.
const wanted = new URL(performance.getEntriesByType("navigation")[0].name).searchParams.get("h");
if (wanted) {
  const words = wanted.toLowerCase().split(/\s+/);
  for (const folded of document.querySelectorAll("article details")) {
    folded.open = words.some((word) => folded.textContent.toLowerCase().includes(word));
  }
}

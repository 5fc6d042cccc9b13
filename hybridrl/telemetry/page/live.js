// A page that follows its run: asks the server for what is new, and says when it is gone.
const EVERY_MS = 2000;
const EVERY_HIDDEN_MS = 15000;
const gone = make("p", { class: "gone", id: "gone", role: "status", hidden: "" }, "The server does not answer. This is what it said last.");
let next = 0;

async function follow() {
  clearTimeout(next);
  try {
    const answer = await fetch(`data?have=${data.live.version}`);
    if (answer.status === 200) {
      data = await answer.json();
      render();
      refreshSamples();
    }
    gone.hidden = answer.ok;
  } catch {
    gone.hidden = false;
  }
  next = setTimeout(follow, document.hidden ? EVERY_HIDDEN_MS : EVERY_MS);
}

PARTS.samples = [sampleViewer, ["samples"]];
page.before(gone);
render();
document.addEventListener("visibilitychange", () => document.hidden || follow());
next = setTimeout(follow, EVERY_MS);

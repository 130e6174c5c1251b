"use strict";
const secret = document.querySelector("meta[name=dashboard]").content;
const most = Number(document.getElementById("receive").dataset.most);
const board = document.getElementById("board"), received = document.getElementById("received");
let seen = "", timer = 0;

// --- the changing part: asked for again and again, replaced only when it has changed ---

async function refresh() {
  clearTimeout(timer);
  try {
    const answer = await fetch("/board", {headers: seen ? {"If-None-Match": seen} : {}});
    if (answer.status === 401) { location.reload(); return; }
    if (answer.status === 200) {
      seen = answer.headers.get("ETag");
      replaceBoard(await answer.text());
    }
    document.getElementById("gone").hidden = true;
  } catch (error) {
    document.getElementById("gone").hidden = false;
  }
  const phase = document.getElementById("phase");
  timer = setTimeout(refresh, phase && phase.dataset.state === "running" ? 700 : 2500);
}

function replaceBoard(text) {
  const focused = document.activeElement && board.contains(document.activeElement) ? document.activeElement.id : "";
  board.innerHTML = text;  // made and escaped by the dashboard; scripts in it would not run, and the policy forbids them too
  if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
}

// --- receiving ---

function note(name) {
  const item = document.createElement("li"), strong = document.createElement("b"), state = document.createElement("span");
  strong.textContent = name + " ";
  item.append(strong, state);
  received.prepend(item);
  return (kind, text) => { state.className = kind; state.textContent = text; };
}

function send(file, show) {
  return new Promise(done => {
    const request = new XMLHttpRequest();
    request.open("POST", "/bundles");
    request.setRequestHeader("X-OSFL-Dashboard", secret);
    request.upload.onprogress = event => show("", event.loaded < event.total
      ? `sending, ${Math.floor(100 * event.loaded / event.total)} %` : "checking");
    request.onload = () => {
      const answer = JSON.parse(request.responseText || "{}");
      if (request.status === 200) show("good", `accepted: the upload of ${answer.client}`);
      else if (request.status === 401 || request.status === 403) location.reload();  // another dashboard answers: its page is newer
      else show("bad", `refused: ${answer.reason}. ${answer.fix || ""}`);
      done();
    };
    request.onerror = () => { show("bad", "not sent: the dashboard does not answer. Drop the file once more."); done(); };
    request.send(file);
  });
}

async function receive(files) {
  for (const file of files) {
    const show = note(file.name);
    if (file.size > most) show("bad", `refused: it is too large. This round takes at most ${most} bytes.`);
    else await send(file, show);
    await refresh();
  }
}

const drop = document.getElementById("drop"), chosen = document.getElementById("files");
chosen.addEventListener("change", () => { receive([...chosen.files]); chosen.value = ""; });
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, event => {  // anywhere on the page: a file dropped beside the field must not replace the page
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragenter" || kind === "dragover");
    if (kind === "drop" && event.dataTransfer) receive([...event.dataTransfer.files]);
  });
}

// --- the server phase ---

board.addEventListener("click", async event => {
  if (event.target.id !== "start") return;
  event.target.disabled = true;
  const answer = await fetch("/phase", {method: "POST", headers: {"X-OSFL-Dashboard": secret}, body: ""});
  if (answer.status === 403) location.reload();
  else if (!answer.ok) note("Server phase")("bad", (await answer.json()).message);
  seen = "";
  refresh();
});

refresh();
